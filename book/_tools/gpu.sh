#!/bin/sh
# gpu.sh OUT: on a machine with a GPU, train recipes/tatoeba-en-de-gpu.toml, score it, and
# race the steps of chapter 14 with the big model, and beam search with two other engines
# (where transformers and ctranslate2 are installed).
# OUT then holds the record (for transformer_lib/evidence/) and the model in half precision (for
# transformer_lib/pretrained/; join the parts of the weights with cat). Interrupted, it
# goes on where it stopped. PYTHON names the interpreter; torch, sentencepiece,
# safetensors, sacrebleu and tqdm are all it needs. On a machine without the internet
# TRANSFORMER_LIB_MIRROR names the folder with the corpora.
set -eu
out=$1 recipe=${2:-tatoeba-en-de-gpu} python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD
run=${TRANSFORMER_LIB_RUNS:-runs}/$recipe
mkdir -p "$out"
$python book/_tools/evidence.py "$recipe" --run-dir "$run" --max-minutes "${MINUTES:-inf}"
$python -c "from transformer_lib.command_line import main; main()" average "$run" --last 10
cp "transformer_lib/evidence/$recipe.json" "$out/"
$python benchmarks/speed.py --device cuda --size big --max-tokens 12000 \
  --out "$out/speed-cuda.json"
if $python -c "import transformers, ctranslate2"; then
  $python benchmarks/decoding.py --device cuda --batch 64 --out "$out/decoding-cuda.json"
fi
(cd "$run/averaged" && split -b 15m weights.safetensors weights.part. && \
  tar -cf - recipe.json about.json tokenizer.model) > "$out/model.tar"
mv "$run"/averaged/weights.part.* "$out/"
