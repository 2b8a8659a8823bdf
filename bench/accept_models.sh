#!/usr/bin/env bash
# What part H claims, on one H200:
#   bench/accept_models.sh OUT_FOLDER            benches (some four minutes), then the tests
#   bench/accept_models.sh OUT_FOLDER PART...    some of: families transformers moe tests
# Results and logs go to the folder. A Triton cache (TRITON_CACHE_DIR) saves most of the compiling.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for results and logs}
shift
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
[ $# -gt 0 ] || set -- families transformers moe tests
failed=

run() { # a name, a limit in seconds, then a command
  local name=$1 limit=$2
  shift 2
  echo "== $name (after $SECONDS s)"
  timeout -s INT "$limit" "$@" > "$out/$name.log" 2>&1 || failed="$failed $name"
  tail -n 60 "$out/$name.log" | cut -c1-150
}

python3 -m hetero_llm.cpu.build || exit 1
python3 -m hetero_llm.bridge.build || exit 1
for part in "$@"; do
  case $part in
    families) run families 200 python3 -m bench.engine.families --out "$out/families.g.json" ;;
    transformers)
      run transformers 90 python3 -m bench.engine.transformers_backend \
        --out "$out/transformers_backend.g.json"
      ;;
    moe) run moe 120 python3 -m bench.engine.moe_decode --batches 1,32 --out "$out/moe_decode.g.json" ;;
    tests)
      run tests 240 python3 -m pytest tests/gpu/scenarios/test_attention_variants_cuda.py \
        tests/gpu/scenarios/test_experts_cuda.py tests/gpu/scenarios/test_loading_cuda.py \
        tests/gpu/scenarios/test_transformers_backend_cuda.py tests/gpu/kernels/test_norm.py \
        tests/gpu/kernels/test_activation.py tests/gpu/test_fused.py \
        tests/gpu/kernels/test_experts.py -n 8 -q -rf -o timeout=120
      ;;
    *) echo "no part '$part'" >&2; exit 2 ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
