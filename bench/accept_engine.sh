#!/usr/bin/env bash
# Acceptance of the engine on the hybrid node: CUDA tests, engine overhead, CPU ratios, a scale-up
# target. Usage: bench/accept_engine.sh OUT_FOLDER  (needs torch, transformers, pytest, hypothesis)
set -u
cd "$(dirname "$0")/.."
out=${1:?folder for the JSON results}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
mkdir -p "$out"
run() { echo "== $*"; timeout 200 "$@" 2>&1 | grep -v "Loading weights" | tail -n 16; }
run python3 -m bench.engine.engine_overhead --out "$out/engine_overhead.g.json"
run python3 -m bench.engine.batch_vs_transformers --threads 2 --out "$out/batch_vs_transformers.g.json"
run python3 -m bench.engine.prefix_hit --threads 2 --out "$out/prefix_hit.g.json"
run python3 -m bench.kernels.cpu_kernels --threads 2 --out "$out/cpu_kernels.g.json"
run python3 -m bench.engine.scaled_target --out "$out/scaled_target.g.json"
run python3 -m pytest tests/gpu tests/cpu/test_native_kernels.py -q --durations=3
echo "== done"
