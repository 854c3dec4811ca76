#!/bin/sh
# setup.sh PYTHON VENV TORCH LOCK: the project's own environment, from the lock; with
# LOCK "none", from the newest versions that pyproject.toml allows.
set -eu
python=$1 venv=$2 torch=$3 lock=$4

if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv" || {
    rm -rf "$venv"
    echo "ERROR: Python could not make a virtual environment." \
         "On Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
  }
fi

# uv is several times faster than pip; where it is unavailable, pip does the same.
[ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv || true
if [ -x "$venv/bin/uv" ]; then
  [ -n "${UV_FIND_LINKS:-}" ] || unset UV_FIND_LINKS
  VIRTUAL_ENV=$(cd "$venv" && pwd)
  export VIRTUAL_ENV
  pip() { "$venv/bin/uv" pip "$@"; }
else
  echo "uv is unavailable: pip does its work."
  pip() { "$venv/bin/python" -m pip "$@"; }
fi

if [ "$lock" = none ]; then
  pip install --upgrade "$torch" --editable ".[book,family,export,test]"
else
  # Torch and the lock in one command: a second one could move what the first had set.
  pip install "$torch" -r "$lock"
  pip install --no-deps --no-build-isolation --editable .
fi
pip check
