#!/usr/bin/env bash
# Acceptance of the engine on the hybrid node: CUDA tests, engine overhead, CPU ratios.
# Usage: bench/accept_engine.sh OUT_FOLDER  (needs only torch, transformers, pytest, hypothesis)
set -u
cd "$(dirname "$0")/.."
out=${1:?folder for the JSON results}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
mkdir -p "$out"
run() { echo "== $*"; timeout 300 "$@" 2>&1 | tail -n 40; }
run python3 -m pytest tests/gpu -x -q --durations=5
run python3 -m bench.engine_overhead --out "$out/engine_overhead.g.json"
run python3 -m bench.prefix_hit --threads 8 --out "$out/prefix_hit.g.json"
run python3 -m bench.batch_vs_transformers --threads 2 --out "$out/batch_vs_transformers.g.json"
run python3 -m pytest tests/engine/test_scheduler.py tests/sampling tests/models -q
echo "== done"
