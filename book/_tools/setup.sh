#!/bin/sh
# setup.sh PYTHON VENV TORCH: the project's own environment, from the lock.
set -eu
python=$1 venv=$2 torch=$3

if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv" || {
    rm -rf "$venv"
    echo "Python could not make a virtual environment." \
         "On Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
  }
fi

[ -n "${UV_FIND_LINKS:-}" ] || unset UV_FIND_LINKS
[ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv || true

# Torch and the lock in one command: a second one could move what the first had set.
if [ -x "$venv/bin/uv" ]; then
  VIRTUAL_ENV=$(cd "$venv" && pwd); export VIRTUAL_ENV
  "$venv/bin/uv" pip install "$torch" -r requirements.lock
  "$venv/bin/uv" pip install --no-deps --no-build-isolation --editable .
  "$venv/bin/uv" pip check
else
  echo "uv could not be had: pip does its work."
  "$venv/bin/python" -m pip install "$torch" -r requirements.lock
  "$venv/bin/python" -m pip install --no-deps --no-build-isolation --editable .
  "$venv/bin/python" -m pip check
fi
