#!/usr/bin/env bash
# What part B claims, on one H200, in two calls of at most ten minutes each:
#   bench/accept_gpu.sh tests OUT_FOLDER
#   bench/accept_gpu.sh bench OUT_FOLDER
# Results and logs go to the folder. A Triton cache (TRITON_CACHE_DIR) saves most of the compiling.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?tests or bench}
out=${2:?folder for results and logs}
export PYTHONPATH=.
mkdir -p "$out"

if [ "$part" = tests ]; then
  python3 -m pytest tests/gpu/kernels -q -n 12 -p no:benchmark >"$out/tests_kernels.log" 2>&1
  python3 -m pytest tests/gpu --ignore tests/gpu/kernels --ignore tests/gpu/test_memory.py -vv \
    -n 4 --dist loadfile --tb=short --durations=10 -p no:benchmark >"$out/tests_engine.log" 2>&1
  # These claim the card's memory, or look at what is free of it.
  python3 -m pytest tests/gpu/test_memory.py -vv --tb=short --durations=5 -p no:benchmark \
    >"$out/tests_memory.log" 2>&1
  grep -hE "^FAILED|^ERROR|^E  | passed| failed" "$out"/tests_*.log
  exit
fi

run() { # a name, then a module with its arguments
  local name=$1
  shift
  echo "== $name"
  timeout 150 python3 -m "$@" >"$out/$name.log" 2>&1
  tail -n "${lines:-16}" "$out/$name.log"
}
run suite bench.gpu_suite --parts decode,ttft,closed --sampling --out "$out"
lines=52 run verify bench.verify --out "$out/verify.g.json"
run attention bench.attention --out "$out/attention.g.json"
run small_linear bench.kernels.small_linear --rows 1 4 8 32 \
  --out "$out/kernels_small_linear.g.json"
run elementwise bench.kernels.elementwise --out "$out/kernels_elementwise.g.json"
run pick bench.kernels.pick --out "$out/kernels_pick.g.json"
run step_parts bench.kernels.step_parts --out "$out/kernels_step_parts.g.json"
run ceilings bench.gpu_ceilings --out "$out/gpu_ceilings.g.json"
