#!/bin/sh
# gpu.sh OUT runs [MINUTES]   work through the queue of long runs on this machine's GPU
# gpu.sh OUT speed            race training and decoding with other engines on it
# gpu.sh OUT all [MINUTES]    both; what is left of the minutes goes to the races
#
# Can be cut off at any moment and called again: runs go on from their checkpoints, and OUT
# holds what is finished: results.tar.gz (for transformer_lib/evidence/results), queue.log,
# the translator's weights in 16 bits in parts (join them with cat), the races' records.
# The runs go on in the background after MINUTES, until the machine is taken away.
#
# PYTHON names the interpreter; torch, sentencepiece, safetensors, sacrebleu and tqdm are
# all it needs (transformers for the anchor and the races, ctranslate2 for the races). On a
# machine without the internet TRANSFORMER_LIB_MIRROR names the folder with the corpora.
# Where the code is no repository, TRANSFORMER_LIB_COMMIT says which commit it is. JOBS:
# processes side by side; QUEUE: groups of the queue; DEVICE=cpu tries all of it without a
# GPU.
set -eu
out=$1 what=${2:-all} minutes=${3:-40} python=${PYTHON:-python3} device=${DEVICE:-cuda}
began=$(date +%s)
cd "$(dirname "$0")/.."
mkdir -p "$out"
out=$(cd "$out" && pwd)
TRANSFORMER_LIB_RUNS=${TRANSFORMER_LIB_RUNS:-$PWD/runs}
PYTHONPATH=$PWD
export TRANSFORMER_LIB_RUNS PYTHONPATH
kept=${TRANSFORMER_LIB_EVIDENCE:-$PWD/transformer_lib/evidence/results}
mkdir -p "$TRANSFORMER_LIB_RUNS" "$kept"

pack() {
  tar -C "$kept" -czf "$out/results.part" . && mv "$out/results.part" "$out/results.tar.gz"
  cp "$TRANSFORMER_LIB_RUNS/queue.log" "$out/" 2>/dev/null || true
  for model in "$TRANSFORMER_LIB_RUNS"/tatoeba-en-de-names/averaged; do
    [ -f "$model/weights.safetensors" ] || continue
    tar -C "$model" -cf - . | split -b 15m - "$out/translator.tar."
  done
}

if [ "$what" != speed ]; then
  here=; [ -d .git ] || here=--here
  pidfile=$TRANSFORMER_LIB_RUNS/queue.pid
  if ! { [ -f "$pidfile" ] && kill -0 "$(cat "$pidfile")" 2>/dev/null; }; then
    # A session of its own: it lives on when this call is over.
    setsid "$python" experiments/queue_runs.py ${QUEUE:-} --device "$device" \
      -j "${JOBS:-14}" $here > "$TRANSFORMER_LIB_RUNS/queue.out" 2>&1 &
    echo $! > "$pidfile"
  fi
  while kill -0 "$(cat "$pidfile")" 2>/dev/null && \
        [ $(($(date +%s) - began)) -lt $((minutes * 60)) ]; do
    sleep 5
  done
  pack
  tail -n 40 "$TRANSFORMER_LIB_RUNS/queue.log"
fi

if [ "$what" != runs ]; then
  "$python" benchmarks/speed.py --device "$device" ${SPEED:---size big --max-tokens 12000} \
    --out "$out/speed-$device.json"
  if "$python" -c "import transformers, ctranslate2"; then
    "$python" benchmarks/decoding.py --device "$device" --batch 64 ${DECODING:-} \
      --out "$out/decoding-$device.json"
  fi
fi
