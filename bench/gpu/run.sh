#!/usr/bin/env bash
# The run on a machine with an NVIDIA GPU: everything that gpuprof says about GPUs, measured in 25 minutes or less.
#
#   bench/gpu/run.sh [OUT]               default: gpu-run-out
#
# Steps go from the most to the least useful and each is given its time, so that a run cut short at any moment leaves
# what was done; what a step printed stands in OUT/NN-step.log, its exit code and seconds in OUT/steps.csv. With COMMIT=1
# each step's output is committed. Nothing of the device is set: its settings before and after are compared in the end.
# On a machine without a GPU the steps that need none run on the CPU, the others say why not.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-gpu-run-out}" && cd "${1:-gpu-run-out}" && pwd) || exit 1
python=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)}
export GPUPROF_DB="$out/gpuprof-db" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
root=$PWD
gpuprof() { "$python" -m gpuprof "$@"; }
began=$(date +%s)
limit=${LIMIT_S:-1500}
echo "step,exit_code,seconds" >"$out/steps.csv"

kind=$("$python" -c 'from gpuprof.local_device import local_gpus; print("gpu" if local_gpus() else "cpu")') || exit 1
if [ "$kind" = gpu ]; then
  models="resnet50 vgg19 densenet121 mobilenet_v2 efficientnet_b7 bert_base gpt2 t5_small"
  shared="resnet50 bert_base mobilenet_v2" batches=1,4,16,64 shares=10,20,30,40,50,60,70,80,90,100 row_s=2 load_s=30
else
  models="squeezenet shufflenet" shared="squeezenet" batches=1,2 shares=50,100 row_s=0.5 load_s=5
fi
models=${MODELS:-$models} shared=${SHARED:-$shared}

# step NAME SECONDS COMMAND...: runs it in OUT with a limit, its children with it, and keeps what it printed.
step() {
  local name=$1 seconds=$2 start left code
  shift 2
  start=$(date +%s)
  left=$((limit - (start - began)))
  [ $left -gt 5 ] || { echo "$name: no time left"; echo "$name,skipped,0" >>"$out/steps.csv"; return 1; }
  [ "$seconds" -lt $left ] || seconds=$left
  echo "== $name ($seconds s at most)"
  (cd "$out" && timeout --kill-after=20 "$seconds" "$@") >"$out/$name.log" 2>&1
  code=$?
  echo "$name,$code,$(($(date +%s) - start))" >>"$out/steps.csv"
  tail -n 3 "$out/$name.log"
  if [ "${COMMIT:-0}" = 1 ] && git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git add -f "$out" && git commit -q -m "Keep what $name measured" -- "$out" || true
  fi
  return $code
}
settings() {
  command -v nvidia-smi >/dev/null 2>&1 || { echo "no nvidia-smi"; return; }
  nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.applications.graphics,clocks.applications.memory,compute_mode,mig.mode.current,persistence_mode --format=csv
}
files() { for model in $1; do [ -e "$out/models/$model.onnx" ] && echo "models/$model.onnx"; done; }

settings >"$out/settings-before.csv" 2>&1

# 1. What is here, and its ceilings.
step 01-doctor 60 "$python" -m gpuprof doctor
step 01-ceilings 90 "$python" -m bench.gpu.ceilings --device "$([ "$kind" = gpu ] && echo cuda || echo cpu)" \
  $([ "$kind" = gpu ] || echo --size 1024 --mib 256) --db "$GPUPROF_DB"

# 2. Models at batch 1 to 64 with the richest collector; the others on one model.
mkdir -p "$out/models"
for model in $models; do
  [ -e "$out/models/$model.onnx" ] || step "02-build-$model" 60 "$python" -m gpuprof zoo build "$model" -o "models/$model.onnx"
done
for model in $models; do
  [ -e "$out/models/$model.onnx" ] || continue
  step "02-profile-$model" 120 "$python" -m gpuprof profile "models/$model.onnx" --batch "$batches" --share 100 \
    --device "$kind" --time-limit $row_s --csv
done
first=$(files "$models" | head -1)
if [ -n "$first" ] && [ "$kind" = gpu ]; then
  for collector in nsys cupti ncu nvml; do
    step "02-with-$collector" 60 "$python" -m gpuprof profile "$first" --batch 4 --share 100 --device gpu \
      --collector "$collector" --time-limit $row_s --csv
  done
fi
step 02-per-op 150 "$python" -m gpuprof profile $(files "$([ "$kind" = gpu ] && echo "$shared" || echo "$models")") \
  --batch "$([ "$kind" = gpu ] && echo 1,16 || echo 1)" --share 100 --device "$kind" --per-op --csv

# 3. Shares, and what runs beside what.
for file in $(files "$shared"); do
  name=$(basename "$file" .onnx)
  step "03-shares-$name" 150 "$python" -m gpuprof profile "$file" --batch 4 --share "$shares" --device "$kind" \
    --time-limit $row_s --csv
done
set -- $(files "$shared")
if [ $# -ge 3 ]; then
  step 03-pair 60 "$python" -m gpuprof profile "$1" --beside "$2:4:50" --batch 4 --share 50 --device "$kind" --time-limit $row_s --csv
  step 03-triple 60 "$python" -m gpuprof profile "$1" --beside "$2:4:30" --beside "$3:4:30" --batch 4 --share 30 \
    --device "$kind" --time-limit $row_s --csv
elif [ $# -ge 1 ]; then
  step 03-pair 60 "$python" -m gpuprof profile "$1" --beside "$1:1:50" --batch 1 --share 50 --device "$kind" --time-limit $row_s --csv
fi

# 4. iGniter: what its coefficients need, the fit, and how far its prediction and the other interference models' are
# off the co-locations measured here and in step 3, each victim left out in turn.
if [ "$kind" = gpu ]; then
  step 04-calibrate 450 "$python" -m gpuprof calibrate $(files "$shared") --device gpu --time-limit $row_s -o igniter.json
fi

# 5. Place three models, serve the map, load it: predicted against measured.
"$python" - "$out" $shared <<'PY' >"$out/slo.csv" 2>"$out/05-slo.log"
import sys
from pathlib import Path
from gpuprof.kernel_db.store import KernelDb
out, names = Path(sys.argv[1]), sys.argv[2:]
rows = KernelDb(out / "gpuprof-db").read("models").to_pylist()
print("model,rate_rps,slo_ms")
for name in names:
    alone = [r for r in rows if r["model"] == name and r["latency_p50_ms"] and not r["error"]]
    if alone:
        one = min(alone, key=lambda r: (r["batch"], -r["sm_share_pct"]))
        print(f"{name},{0.3 * 1000 / one['latency_p50_ms']:.2f},{max(20.0, 12 * one['latency_p50_ms']):.1f}")
PY
if [ "$(wc -l <"$out/slo.csv")" -gt 1 ] && step 05-place 60 "$python" -m gpuprof place --slo-file slo.csv -o map.json; then
  (cd "$out" && exec timeout --kill-after=20 240 "$python" -m gpuprof serve map.json --port 8123) >"$out/05-serve.log" 2>&1 &
  server=$!
  for _ in $(seq 60); do
    "$python" -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8123/v2/health/ready", timeout=1)' 2>/dev/null && break
    kill -0 $server 2>/dev/null || break
    sleep 1
  done
  step 05-load 120 "$python" -m gpuprof load http://127.0.0.1:8123 --map map.json --duration $load_s --csv
  kill -INT $server 2>/dev/null
  wait $server 2>/dev/null
fi

# What is kept, whatever the time.
limit=$((limit + 120))
step 06-verify 60 "$python" -m gpuprof db verify
step 06-compact 60 "$python" -m gpuprof db compact
du -sh "$GPUPROF_DB" 2>/dev/null
settings >"$out/settings-after.csv" 2>&1
cmp -s "$out/settings-before.csv" "$out/settings-after.csv" && echo "the device's settings are as they were found" ||
  { echo "the device's settings CHANGED: compare $out/settings-before.csv and $out/settings-after.csv"; exit 1; }
echo "$(($(date +%s) - began)) s; what each step did: $out/steps.csv"
