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

tests() { # a name, a limit in seconds, then what pytest gets
  local name=$1 limit=$2
  shift 2
  echo "== tests of $name (after $SECONDS s)"
  timeout "$limit" python3 -m pytest "$@" -vv --tb=short --durations=5 -p no:benchmark \
    -o faulthandler_timeout=100 2>&1 | while IFS= read -r line; do
    printf '%4d %s\n' $SECONDS "$line"
  done >"$out/tests_$name.log"
  grep -E "FAILED|ERROR|^ *[0-9]+ E  | passed| failed|Timeout" "$out/tests_$name.log" | tail -n 40
}
if [ "$part" = tests ]; then
  tests kernels 200 tests/gpu/kernels -n 12
  tests engine 280 tests/gpu --ignore tests/gpu/kernels --ignore tests/gpu/test_memory_cuda.py \
    -n 5 --dist loadfile
  tests memory 150 tests/gpu/test_memory_cuda.py # they claim the card's memory or look what is free
  echo "== done after $SECONDS s"
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
run skinny_gemm bench.kernels.skinny_gemm --rows 1 4 8 32 \
  --out "$out/kernels_small_linear.g.json"
run elementwise bench.kernels.elementwise --out "$out/kernels_elementwise.g.json"
run sample bench.kernels.sample --out "$out/kernels_pick.g.json"
run step_parts bench.kernels.step_parts --out "$out/kernels_step_parts.g.json"
run ceilings bench.gpu_ceilings --out "$out/gpu_ceilings.g.json"
