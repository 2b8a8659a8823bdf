#!/usr/bin/env bash
# What part F claims, on one H200, in calls of at most ten minutes each:
#   bench/accept_offload.sh OUT_FOLDER              all parts of bench.offload.suite, the tests, a plot
#   bench/accept_offload.sh OUT_FOLDER soak         five minutes of random traffic, with and without
#   bench/accept_offload.sh OUT_FOLDER PART...      some of: tests soak, and bench.offload.suite's parts
# Results and logs go to the folder. A Triton cache (TRITON_CACHE_DIR) saves most of the compiling.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for results and logs}
shift
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
models=${MODELS:-$(mktemp -d)}
limit=${LIMIT:-540} # seconds of the whole call
tests=no soak=no parts=
if [ $# -eq 0 ]; then
  tests=yes parts=pool,ttft,busy,shared,behind,decode,stores,trace,spec
fi
for part in "$@"; do
  case $part in
    tests) tests=yes ;;
    soak) soak=yes ;;
    *) parts=${parts:+$parts,}$part ;;
  esac
done

run() { # a name, a limit in seconds, then a command
  local name=$1 limit=$2
  shift 2
  echo "== $name (after $SECONDS s)"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local status=$?
  tail -n "${lines:-6}" "$out/$name.log" | cut -c1-200
  [ "$status" -eq 0 ] || { echo "$name: exit $status" && failed=yes; }
}

scaled() { # a model, a shape, a device
  [ -d "$models/$2" ] || run "scale_$2" 90 python3 tools/scale_up.py "hetero_llm/demo_models/$1" \
    "$2" "$models/$2" --device "$3"
}

failed=no
run build 120 sh -c "python3 -m hetero_llm.cpu.build && python3 -m hetero_llm.bridge.build"
if [ $tests = yes ]; then
  run tests 90 python3 -m pytest tests/gpu/scenarios/test_offload_cuda.py -v --tb=short --durations=5
fi
if [ -n "$parts" ]; then
  pair=()
  case ,$parts, in
    *,spec,*)
      scaled demo-draft draft-68m cpu
      scaled demo mistral-7b cuda
      pair=(--target "$models/mistral-7b" --draft "$models/draft-68m")
      ;;
  esac
  left=$((limit - SECONDS))
  lines=90 run offload "$left" python3 -m bench.offload.suite --parts "$parts" "${pair[@]}" \
    --budget $((left - 15)) --out "$out"
  [ -f "$out/offload.ttft.json" ] && run plot 30 python3 -m bench.offload.plot \
    "$out/offload.ttft.json" "$out/offload_ttft.png"
fi
if [ $soak = yes ]; then
  SOAK_SECONDS=300 lines=30 run soak 420 python3 -m pytest tests/gpu/scenarios/test_offload_cuda.py \
    -k soak -v --tb=short
fi
echo "== done after $SECONDS s"
[ $failed = no ]
