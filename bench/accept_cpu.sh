#!/usr/bin/env bash
# What part C claims, on a machine with AMX and 16 cores, in one call of at most nine minutes and
# without network or peers: bench/accept_cpu.sh OUT_FOLDER
# Results and logs go to the folder. THREADS: of the engine (default: 12, or as many as there are).
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for results and logs}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
mkdir -p "$out"
readonly whole=540
cores=$(python3 -c "from hetero_llm.utils.topology import compute_cpus; print(len(compute_cpus(0)))")
threads=${THREADS:-$((cores < 12 ? cores : 12))}

run() { # a name, a limit in seconds, then a command
  local name=$1 limit=$2 left=$((whole - SECONDS))
  shift 2
  echo "== $name (after $SECONDS s)"
  if [ "$left" -lt 10 ]; then
    echo "left out: no time"
    return
  fi
  timeout $((limit < left ? limit : left)) "$@" >"$out/$name.log" 2>&1
  local status=$?
  tail -n "${lines:-12}" "$out/$name.log"
  [ "$status" -eq 0 ] || echo "$name: exit $status"
}
offline() { # a model, a type, then more arguments
  local model=$1 dtype=$2
  shift 2
  lines=8 run "offline_${model}_$dtype" 120 python3 -m bench.engine.cpu_offline --model "$model" \
    --dtype "$dtype" --threads "$threads" --patience 5 "$@" \
    --out "$out/cpu_offline.$model.$dtype.g.json"
}

echo "$cores cores, $threads threads"
run build 90 python3 -m hetero_llm.cpu.build
lines=16 run draft_step 150 python3 -m bench.speculation.draft_step --threads 12,8 \
  --out "$out/draft_step.g.json"
offline L bfloat16 --rounds 2
offline M bfloat16 --rounds 2
lines=30 run matmul 75 python3 -m bench.kernels.cpu_matmul --threads "$threads" \
  --formats BF16 INT8 --out "$out/kernels_cpu_matmul.g.json"
lines=16 run attention 60 python3 -m bench.kernels.cpu_attention \
  --out "$out/kernels_cpu_attention.g.json"
lines=6 run tests 150 python3 -m pytest tests/cpu/csrc/step -q --tb=short --durations=5
offline L int8 --rounds 1 --work decode1,prefill
offline S bfloat16 --rounds 1
echo "== done after $SECONDS s"
