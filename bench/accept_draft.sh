#!/usr/bin/env bash
# What part E claims, on one H200 with an AMX Xeon, in two calls of at most ten minutes each:
#   bench/accept_draft.sh main OUT_FOLDER      speed-ups, timeline, faults, hand-off
#   bench/accept_draft.sh more OUT_FOLDER      other modes, a temperature, the GPU's own draft, 13B
# Results and logs go to the folder. A Triton cache (TRITON_CACHE_DIR) saves most of the compiling.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:?main or more}
out=${2:?folder for results and logs}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
models=${MODELS:-$(mktemp -d)}

run() { # a name, a limit in seconds, then a command
  local name=$1 limit=$2
  shift 2
  echo "== $name (after $SECONDS s)"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local status=$?
  tail -n "${lines:-6}" "$out/$name.log" | cut -c1-175
  [ "$status" -eq 0 ] || echo "$name: exit $status"
}

scaled() { # a model, a shape, a device
  [ -d "$models/$2" ] || run "scale_$2" 90 python3 tools/scale_up.py "hetero_llm/demo_models/$1" \
    "$2" "$models/$2" --device "$3"
}

spec() { # a name, a limit, then arguments of bench.speculation.speedup
  local name=$1 limit=$2
  shift 2
  lines=${lines:-12} run "$name" "$limit" python3 -m bench.speculation.speedup --device cuda --repeats 1 \
    --prompt 1024 --tokens 256 --random 8 --draft "$models/draft-68m" --out "$out/$name.json" "$@"
}

run build 90 python3 -m hetero_llm.cpu.build
scaled demo-draft draft-68m cpu
scaled demo mistral-7b cuda
target=$models/mistral-7b
if [ "$part" = main ]; then
  run rings 30 python3 -m bench.speculation.rings --cpus 0 1 --out "$out/rings.g.json"
  lines=34 spec speculation.draft 240 --model "$target" --batches 1,8,32 \
    --arms none merged draft "draft + merged"
  run timeline 70 python3 -m bench.speculation.timeline --model "$target" --draft "$models/draft-68m" --out "$out"
  run draft_faults 90 python3 -m bench.speculation.draft_faults --model "$target" \
    --draft "$models/draft-68m" --out "$out/draft_faults.g.json"
else
  spec speculation.sampled 70 --model "$target" --batches 1 --arms none draft --temperature 0.7
  spec speculation.gpu_draft 90 --model "$target" --batches 1,8,32 --arms none "gpu draft" --gpu-draft
  spec speculation.enumerate 70 --model "$target" --batches 1 --arms none draft --overlap enumerate
  spec speculation.off 70 --model "$target" --batches 1 --arms none draft --overlap off
  rm -rf "$target"
  scaled demo llama-2-13b cuda
  spec speculation.13b 120 --model "$models/llama-2-13b" --batches 1,8 \
    --arms none draft "draft + merged"
fi
echo "== done after $SECONDS s"
