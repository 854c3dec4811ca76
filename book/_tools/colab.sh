#!/bin/sh
# colab.sh PYTHON TORCH: chapters as Colab runs them. A machine that has torch and
# Jupyter gets the library by pip, not editable, and runs notebooks that lie outside of
# the project; the torch that was there must still be there afterwards.
set -eu
python=$1 torch=$2
root=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" -m venv "$place/env"
bin=$place/env/bin
"$bin/python" -m pip install --quiet uv
[ -n "${UV_FIND_LINKS:-}" ] || unset UV_FIND_LINKS
VIRTUAL_ENV=$place/env
export VIRTUAL_ENV
unset PYTHONPATH
"$bin/uv" pip install --quiet "$torch" ipykernel nbclient matplotlib
version() { "$bin/python" -c 'import torch; print(torch.__version__)'; }
before=$(version)

# The project's files without what is built here, as pip would get them from git.
mkdir "$place/project" "$place/content"
tar -C "$root" --exclude=./_build --exclude=./.venv --exclude=./.git -cf - . \
  | tar -C "$place/project" -xf -
"$bin/uv" pip install --quiet "$place/project"
after=$(version)
if [ "$before" != "$after" ]; then
  echo "ERROR: installing the library changed torch from $before to $after" >&2
  exit 1
fi

cp notebooks/01_*.ipynb notebooks/02_*.ipynb notebooks/07_*.ipynb "$place/content"
rm -rf "$place/project"
cd "$place/content"
PATH=$bin:$PATH
export PATH OMP_NUM_THREADS=1
for notebook in *.ipynb; do
  "$bin/jupyter-execute" --timeout=600 "$notebook"
  echo "$notebook ran with torch $after and the installed library"
done
