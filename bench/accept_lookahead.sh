#!/usr/bin/env bash
# What part D claims, on one H200, in one call of at most ten minutes: bench/accept_lookahead.sh OUT
# Results and logs go to the folder. A Triton cache (TRITON_CACHE_DIR) saves most of the compiling.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for results and logs}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
mkdir -p "$out"
model=$(mktemp -d)/mistral-7b
trap 'rm -rf "$(dirname "$model")"' EXIT

run() { # a name, a limit in seconds, then a command
  local name=$1 limit=$2
  shift 2
  echo "== $name (after $SECONDS s)"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local status=$?
  tail -n "${lines:-8}" "$out/$name.log" | cut -c1-160
  [ "$status" -eq 0 ] || echo "$name: exit $status"
}

run build 90 python3 -m hetero_llm.cpu.build
run tests 200 python3 -m pytest tests/gpu/scenarios/test_lookahead_cuda.py \
  tests/gpu/scenarios/test_drafts_beside_cuda.py -n 5 --dist loadfile -q --tb=short -p no:benchmark
run scale_up 60 python3 tools/scale_up.py hetero_llm/demo_models/demo mistral-7b "$model" --device cuda
lines=45 run speculation 260 python3 -m bench.speculation.speedup --model "$model" --device cuda \
  --batches 1,8,32,128 --prompt 1024 --tokens 256 --random 8 --repeats 1 \
  --arms none ngram hybrid merged warm --out "$out/speculation.cuda.json"
lines=14 run lookahead_cache 60 python3 -m bench.speculation.lookahead_cache --threads 8 \
  --out "$out/lookahead_cache.g.json"
echo "== done after $SECONDS s"
