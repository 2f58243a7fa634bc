#!/usr/bin/env bash
# Profiles the zoo with every collector that works on this machine and leaves a database and a summary.
#
#   bench/gpu_profile.sh [OUT]            default: gpu-profile-out
#
# MODELS, BATCHES and SECONDS_A_ROW say what is measured. With a GPU the richest collector measures all models and
# the others the first one, as a check on one another; without one the CPU measures small models.
set -uo pipefail
out=${1:-gpu-profile-out}
python=${PYTHON:-$( [ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python3)}
gpuprof() { "$python" -m gpuprof "$@"; }
mkdir -p "$out/models"
export GPUPROF_DB="$out/gpuprof-db"

kind=$("$python" -c 'from gpuprof.machine.gpu import local_gpus; print("gpu" if local_gpus() else "cpu")') || exit 1
if [ "$kind" = gpu ]; then
  models=${MODELS:-resnet50 vgg19 densenet121 mobilenet_v2 efficientnet_b7 bert_base gpt2 t5_small}
  batches=${BATCHES:-1,4,16,64}
  collectors="nsys+ncu cupti+ncu nsys cupti ncu nvml"
else
  models=${MODELS:-squeezenet shufflenet}
  batches=${BATCHES:-1,4}
  collectors=ort
fi
seconds=${SECONDS_A_ROW:-3}

files=()
for model in $models; do
  file="$out/models/$model.onnx"
  [ -e "$file" ] || gpuprof zoo build "$model" -o "$file" || { echo "left out: $model" >&2; continue; }
  files+=("$file")
done
[ ${#files[@]} -gt 0 ] || { echo "no model could be built" >&2; exit 1; }

# Exit code 2: measured, on a machine too noisy to trust it; the rows are marked.
measured=""
for collector in $collectors; do
  wanted=("${files[@]}")
  [ -z "$measured" ] || wanted=("${files[0]}")
  echo "== $collector: ${#wanted[@]} models at batch $batches on the $kind"
  gpuprof profile "${wanted[@]}" --batch "$batches" --share 100 --device "$kind" --collector "$collector" \
    --time-limit "$seconds" --csv >"$out/$collector.csv" 2> >(tee "$out/$collector.log" >&2)
  code=$?
  if [ $code = 0 ] || [ $code = 2 ]; then
    measured="$measured $collector"
  else
    echo "$collector does not work here: exit code $code" >&2
    [ -s "$out/$collector.csv" ] || rm -f "$out/$collector.csv"
  fi
done
[ -n "$measured" ] || { echo "no collector works here: gpuprof doctor says what is missing" >&2; exit 1; }
if [ "$kind" = cpu ]; then
  echo "== each distinct op once"
  gpuprof profile "${files[@]}" --batch "$batches" --share 100 --device cpu --per-op --csv >"$out/per-op.csv" || true
fi
gpuprof db verify || exit 1
gpuprof db sql "select m.device, r.collector, m.model, m.batch, m.latency_p50_ms, m.throughput_rps, m.memory_peak_bytes,
  m.power_w, m.max_occupancy_pct, m.wavg_occupancy_pct, m.wavg_sm_util_pct, m.l2_pct, m.dram_pct, m.kernel_count,
  m.dispatch_ms, m.stable, m.error from models m join runs r using (run_id) order by all" --csv >"$out/summary.csv"
echo "== measured with$measured; $(($(wc -l <"$out/summary.csv") - 1)) rows in $out/summary.csv, database $GPUPROF_DB"
