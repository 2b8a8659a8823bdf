#!/usr/bin/env bash
# Everything that part B claims, on one H200: results into the folder OUT (default bench/results).
# About 12 minutes from a cold Triton cache.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT="${OUT:-bench/results}"
export PYTHONPATH=. TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/build/triton-cache}"
mkdir -p "$OUT" "$TRITON_CACHE_DIR"

# Kernels against their twins, then the engine; the second needs the whole card.
python3 -m pytest tests/gpu/kernels -q -n 12 -p no:benchmark >"$OUT/tests_kernels.log" 2>&1
python3 -m pytest tests/gpu --ignore tests/gpu/kernels -v --durations=15 -p no:benchmark \
  >"$OUT/tests_engine.log" 2>&1
python3 -m bench.gpu_suite --parts decode,ttft,closed --sampling --out "$OUT" >"$OUT/suite.log" 2>&1
python3 -m bench.verify --out "$OUT/verify.g.json" >"$OUT/verify.log" 2>&1
python3 -m bench.attention --out "$OUT/attention.g.json" >"$OUT/attention.log" 2>&1
python3 -m bench.kernels.small_linear --rows 1 4 8 32 --out "$OUT/kernels_small_linear.g.json" \
  >"$OUT/small_linear.log" 2>&1
python3 -m bench.kernels.elementwise --out "$OUT/kernels_elementwise.g.json" \
  >"$OUT/elementwise.log" 2>&1
python3 -m bench.kernels.pick --out "$OUT/kernels_pick.g.json" >"$OUT/pick.log" 2>&1
python3 -m bench.gpu_ceilings --out "$OUT/gpu_ceilings.g.json" >"$OUT/ceilings.log" 2>&1

tail -n 30 "$OUT/tests_kernels.log" "$OUT/tests_engine.log" | grep -E "passed|failed|FAILED|ERROR"
tail -n 16 "$OUT/suite.log"
tail -n 52 "$OUT/verify.log"
