#!/usr/bin/env bash
# The run on a machine with an NVIDIA GPU: everything that gpuprof says about GPUs, as far as 15 minutes go. Run it
# again with the same OUT for the rest.
#
#   bench/gpu/run.sh [OUT]               default: gpu-run-out
#   LIMIT_S=480 bench/gpu/run.sh [OUT]   in pieces: run again with the same OUT, it goes on where it was stopped
#   RESUME=DIR bench/gpu/run.sh [OUT]    in pieces on several machines: OUT is first made of what the last one packed
#   RETRY=1 bench/gpu/run.sh [OUT]       run again what failed, too
#   WHEELS=DIR bench/gpu/run.sh [OUT]    with packages from wheels (bench/gpu/wheels.txt), installed into OUT only
#   REHEARSE=1 bench/gpu/run.sh [OUT]    each kind of step on a machine without a GPU: ONNX Runtime on the CPU, played tools
#
# Steps go from the most to the least useful, each has its time, and none needs another to have gone well, so that a
# run that is cut short leaves what was done. What a step printed stands in OUT/NN-step.log, its exit code and seconds
# in OUT/steps.csv; OUT/packed has it all in files of at most 15 MiB, OUT/page what `gpuprof report` draws
# of it. With COMMIT=1 each step's output is committed. Saving takes up to 100 s after LIMIT_S, as a rule ten.
#
# The time: all models are built first, side by side. A model under a share is one process that goes through all its
# batch sizes, times first and recordings then: on an H200 8 to 9 s a row, 18 under a share. Only small batches are
# measured twice, in two processes. In order of worth: 3 models at 5 batches, and one without the runtime's options,
# 3 min; place, serve and load 2; shares and co-locations 5; counters 1; 5 unseen models 2; half precision 1; iGniter's
# configurations 4 a model; more batches, counters and collectors; calibrate runs afterwards, from what was measured.
# ONNX Runtime runs the models: ORT_SITE names a folder with the package, where it is not installed.
# COPY_TO=DIR copies what is packed there in the end.
# Nothing of the device is set: its settings before and after are compared in the end. Without a GPU, and not
# rehearsed, the steps that need none run on the CPU and the others say why not.
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
out=$(mkdir -p "${1:-gpu-run-out}" && cd "${1:-gpu-run-out}" && pwd) || exit 1
python=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)}
began=$(date +%s)
limit=${LIMIT_S:-780}
tail_s=60 # for what is kept in the end
mkdir -p "$out/done" "$out/failed" "$out/models" "$out/logs"
if [ -n "${RESUME:-}" ] && [ ! -e "$out/steps.csv" ]; then
  cat "$RESUME"/gpu-run.tar.gz.* | tar -C "$out" -xz || exit 1
fi
[ -z "${RETRY:-}" ] || rm -f "$out"/failed/*
[ -e "$out/steps.csv" ] || echo "step,exit_code,seconds" >"$out/steps.csv"

# Logs and sockets of this run, ended with it; a socket's path may have 107 characters, so that it is not in OUT.
TMPDIR=$(mktemp -d /tmp/gpuprof-run-XXXXXX) || exit 1
export TMPDIR GPUPROF_DB="$out/gpuprof-db" PYTHONUNBUFFERED=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --upgrade --target "$out/site" "$WHEELS"/*.whl || exit 1
fi
[ ! -d "$out/site" ] || export PYTHONPATH="$PYTHONPATH:$out/site"
# ONNX Runtime for GPUs in a folder of its own, before the one that is installed, and CUDA's libraries that pip brought.
main_path=$PYTHONPATH
if [ -n "${ORT_SITE:-}" ]; then
  main_path="$ORT_SITE:$PYTHONPATH"
  cuda_libraries=$("$python" -c 'import glob, nvidia; print(":".join(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")))' 2>/dev/null)
  export LD_LIBRARY_PATH="${cuda_libraries:-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
if [ -n "${REHEARSE:-}" ]; then
  main_path="$root/bench/gpu/rehearsal/site:$main_path"
  export PATH="$root/bench/gpu/rehearsal/bin:$PATH" PYTHONPATH="$root/bench/gpu/rehearsal/site:$PYTHONPATH"
  export REHEARSAL_WITHOUT=${REHEARSAL_WITHOUT-xgboost,lightgbm,skops,ray}
fi

settings() {
  command -v nvidia-smi >/dev/null 2>&1 || { echo "no nvidia-smi"; return; }
  nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.applications.graphics,clocks.applications.memory,compute_mode,mig.mode.current,persistence_mode --format=csv
}
# Daemons of MPS that a killed step left are told to quit, whatever ends this run.
clean_up() {
  for pipe in "$TMPDIR"/gpuprof-mps-*/pipe "$TMPDIR"/mps/pipe; do
    [ ! -d "$pipe" ] || echo quit | CUDA_MPS_PIPE_DIRECTORY=$pipe timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1
  done
  find "$TMPDIR" -maxdepth 1 -name 'gpuprof-*.log' -exec mv {} "$out/logs" \; 2>/dev/null
  rm -rf "$TMPDIR"
}
trap clean_up EXIT
child=
trap '[ -z "$child" ] || { kill -INT $child; wait $child; }; exit 130' INT TERM

# step NAME SECONDS COMMAND...: runs it in OUT with a limit, its children with it, and keeps what it printed. It is
# interrupted first, so that it stops daemons of its own. One that went well, or failed by itself, is not run again.
step() {
  local name=$1 seconds=$2 start left code
  shift 2
  [ ! -e "$out/done/$name" ] || { echo "== $name: done before"; return 0; }
  [ ! -e "$out/failed/$name" ] || { echo "== $name: failed before"; return 1; }
  start=$(date +%s)
  left=$((limit - tail_s - (start - began)))
  [ $left -gt 5 ] || { echo "== $name: no time left"; echo "$name,skipped,0" >>"$out/steps.csv"; return 1; }
  [ "$seconds" -lt $left ] || seconds=$left
  echo "== $name ($seconds s at most)"
  # In the background, since bash runs no trap while it waits for a command in the foreground.
  (trap - INT && cd "$out" && exec timeout --signal=INT --kill-after=20 "$seconds" "$@") >"$out/$name.log" 2>&1 &
  child=$!
  wait $child
  code=$? child=
  echo "$name,$code,$(($(date +%s) - start))" >>"$out/steps.csv"
  case $code in
  0 | 2) touch "$out/done/$name" ;; # 2: measured, on a machine too noisy to trust it; the rows are marked
  124 | 130 | 137) ;;               # its time was over
  *) touch "$out/failed/$name" ;;
  esac
  tail -n 3 "$out/$name.log"
  if [ "${COMMIT:-0}" = 1 ] && git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git add -f -- "$out" ":(exclude)$out/models" ":(exclude)$out/site" ":(exclude)$out/packed" &&
      git commit -q -m "Keep what $name measured" -- "$out" || true
  fi
  return $code
}
gpuprof() { # gpuprof STEP SECONDS VERB...
  local name=$1 seconds=$2
  shift 2
  step "$name" "$seconds" "$python" -m gpuprof "$@"
}
build() { # of a build that is cut off no half a model is left
  [ -e "$out/models/$1.onnx" ] && return
  mkdir -p "$out/models/building"
  rm -f "$out/done/02-build-$1" # the model was not kept with the rest
  gpuprof "02-build-$1" 120 zoo build "$1" -o "models/building/$1.onnx" && mv "$out/models/building/$1.onnx"* "$out/models"
}
build_all() { # side by side, as many as there are cores: nothing is measured meanwhile
  local model running=()
  for model in $1; do
    (COMMIT=0; build "$model") &
    running+=($!)
    [ ${#running[@]} -lt "$(nproc)" ] || { wait "${running[0]}"; running=("${running[@]:1}"); }
  done
  wait "${running[@]}"
}
files() { for model in $1; do [ ! -e "$out/models/$model.onnx" ] || echo "models/$model.onnx"; done; }
profile() { # profile STEP SECONDS FILE...: with the collector of the run unless another is named
  local name=$1 seconds=$2
  shift 2
  gpuprof "$name" "$seconds" profile "$@" --device "$kind" --time-limit $row_s --profiler-limit 90 --keep-unstable --csv
}
batches_of() { # batches_of MODEL BATCHES: EfficientNet-B7 takes seconds and tens of gigabytes above 16
  case $1 in
  efficientnet_b7) echo "$2" | tr , '\n' | awk '$1 <= 16' | paste -sd, ;;
  *) echo "$2" ;;
  esac
}

# What works here: every timing is by one collector, so that what one step measured no other measures again. PyTorch's
# profiler comes first: an nsys may be there whose importer is not.
probe='
from gpuprof.machine.gpu import local_gpus
from gpuprof.plugins import load_plugin
from gpuprof.profiling.collector import COLLECTORS
works = lambda name: load_plugin("collector", name, COLLECTORS)().available() is None
gpus = local_gpus()
kind = "gpu" if gpus else "cpu"
working = [name for name in ("cupti", "nsys", "nvml", "ncu") if gpus and works(name)]
timing = next((name for name in working if name != "ncu"), "nvml") if gpus else "ort"
from gpuprof.runtime.gpu_probe import gpu_provider
counting = f"{timing}+ncu" if timing != "nvml" else "ncu"
others = ",".join(name for name in working if name != timing)
print(kind, gpus[0].name if gpus else "cpu", timing, counting if gpus and works(counting) else "none", others or "none", (gpus and gpu_provider()) or "CPUExecutionProvider")
'
settings >"$out/settings-before.csv" 2>&1
export PYTHONPATH=$main_path
found=$("$python" -c "$probe") || { echo "gpuprof does not start: bench/gpu/wheels.txt says what it needs"; exit 1; }
read -r kind device timing counting also provider <<<"$found"
echo "on $device by $provider, timed by $timing, counted by $counting, also there: $also"
if [ "$kind" = cpu ]; then
  shared="squeezenet" others="shufflenet" batches=1,2 more_batches=1,2 most_batches=1,2 batch=1 plain_batches= shares=50,100 row_s=0.5
  load_s=5 rest=
  matrices="--device cpu --size 1024 --mib 256"
elif [ -n "${REHEARSE:-}" ]; then
  shared="mlp lstm_classifier random_cnn" others="transformer_encoder" batches=1,16 more_batches=1 most_batches=1,2 batch=16
  plain_batches=16 shares=20,50 row_s=0.3 load_s=5 rest= matrices="--device cpu --as-gpu --size 512 --mib 64"
else
  shared="resnet50 bert_base mobilenet_v2" others="vgg19 gpt2 densenet121 t5_small efficientnet_b7"
  batches=1,4,16,32,64 more_batches=1,16 most_batches=4,64 batch=16 plain_batches=1,16,64 shares=10,20,30,50,70
  row_s=2 load_s=20 rest=yes matrices="--device cuda"
fi
shared=${SHARED:-$shared} others=${OTHERS:-$others}

build_all "$shared $others"
# 1. What is here, and its ceilings.
gpuprof 01-doctor 60 doctor
step 01-ceilings 90 "$python" -m bench.gpu.ceilings $matrices --db "$GPUPROF_DB"

# 2. Three models at batch 1 to 64, of which everything else is made; one without the runtime's options as well.
first=$(files "$shared" | head -1)
profile_each() { # profile_each NAME SECONDS MODELS BATCHES OPTION...: a step for each model
  local name=$1 seconds=$2 models=$3 sizes=$4 file
  shift 4
  for file in $(files "$models"); do
    profile "$name-$(basename "$file" .onnx)" "$seconds" "$file" --batch "$(batches_of "$(basename "$file" .onnx)" "$sizes")" "$@"
  done
}
timed=(--share 100 --collector "$timing")
profile_each 02-profile 120 "${shared%% *}" "$batches" "${timed[@]}"
if [ "$kind" = gpu ] && [ -n "$first" ]; then
  GPUPROF_GPU_OPTIONS=plain profile 02-plain 90 "$first" --batch $plain_batches "${timed[@]}"
fi
profile_each 02-profile 120 "$shared" "$batches" "${timed[@]}"

# 3. Place the models, serve the map, load it: predicted against measured.
demand='
import sys
from pathlib import Path
from gpuprof.kernel_db.store import KernelDb
rows = KernelDb(Path("gpuprof-db")).read_table("models").to_pylist()
print("model,rate_rps,slo_ms")
for name in sys.argv[1:]:
    alone = [r for r in rows if r["model"] == name and r["latency_p50_ms"] and not r["error"]]
    if alone:
        took_ms = min(alone, key=lambda r: (r["batch"], -r["sm_share_pct"]))["latency_p50_ms"]
        print(f"{name},{0.3 * 1000 / took_ms:.2f},{max(20.0, 12 * took_ms):.1f}")
'
(cd "$out" && "$python" -c "$demand" $shared) >"$out/slo.csv" 2>"$out/03-slo.log"
if [ "$(wc -l <"$out/slo.csv")" -gt 1 ]; then # where HiGHS is missing, a policy that needs no solver
  here=(--best-effort --gpus "$device:1" --slo-file slo.csv -o map.json)
  gpuprof 03-place 60 place "${here[@]}" --time-limit 30
  [ -e "$out/map.json" ] || gpuprof 03-place-ffd 60 place "${here[@]}" --policy ffd
fi
if [ -e "$out/map.json" ] && [ ! -e "$out/done/03-load" ]; then
  (cd "$out" && exec timeout --signal=INT --kill-after=20 200 "$python" -m gpuprof serve map.json --port 8123) \
    >"$out/03-serve.log" 2>&1 &
  server=$!
  for _ in $(seq 90); do
    "$python" -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8123/v2/health/ready", timeout=1)' 2>/dev/null && break
    kill -0 $server 2>/dev/null || break
    sleep 1
  done
  gpuprof 03-load 90 load http://127.0.0.1:8123 --map map.json --duration $load_s --csv -o load.json
  kill -INT $server 2>/dev/null
  wait $server 2>/dev/null
  tail -n 1 "$out/03-serve.log"
fi

# 4. Shares, and what runs beside what, under one daemon of MPS for all: its logs stay in OUT/mps. Where no client of it
# starts, no share is measured and nothing is co-located.
mps_on() {
  mkdir -p "$TMPDIR/mps/pipe" "$out/mps"
  export CUDA_MPS_PIPE_DIRECTORY="$TMPDIR/mps/pipe" CUDA_MPS_LOG_DIRECTORY="$out/mps"
  nvidia-cuda-mps-control -d >"$out/mps/start.log" 2>&1
}
mps_off() {
  [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || return 0
  echo quit | timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
client='
import os, subprocess, sys
from gpuprof.machine.mps import mps_daemon
with mps_daemon() as daemon:
    program = "import torch; assert torch.cuda.is_available(); torch.zeros(1, device=\"cuda\") if not sys.argv[1:] else None"
    program += "; from gpuprof.machine.gpu import visible_sms; print(\"SMs of a client of 50%:\", visible_sms())"
    words = [sys.executable, "-c", "import sys; " + program, *sys.argv[1:]]
    code = subprocess.run(words, env={**os.environ, **daemon.environment(50.0)}, timeout=60).returncode
sys.exit(code)
'
with_mps=yes
if [ "$kind" != cpu ]; then
  mps_on
  step 04-mps 90 "$python" -c "$client" ${REHEARSE:+rehearsed} || with_mps=
  for log in "$out"/mps/*.log; do # what MPS says is the run's to show
    [ ! -s "$log" ] || { echo "-- $(basename "$log")"; tail -n 5 "$log"; }
  done
  [ -n "$with_mps" ] || mps_off
fi
[ -z "$with_mps" ] || profile_each 04-shares 150 "${shared%% *}" $batch --share "$shares" --collector "$timing"
beside() { # beside STEP SHARE FILE FILE...: the first beside the others, each in the share
  local name=$1 share=$2 one=$3 each neighbours=()
  shift 3
  for each; do neighbours+=(--beside "$each:$batch:$share"); done
  profile "$name" 90 "$one" "${neighbours[@]}" --batch $batch --share "$share" --collector "$timing"
}
set -- ${with_mps:+$(files "$shared")}
if [ $# -ge 3 ]; then
  beside 04-pair-1-2 50 "$1" "$2"
  beside 04-triple 30 "$1" "$2" "$3"
  if [ -n "$rest" ]; then
    beside 04-pair-1-3 50 "$1" "$3"
    beside 04-pair-2-3 50 "$2" "$3"
  fi
elif [ $# -ge 1 ]; then
  beside 04-pair-1-1 50 "$1" "$1"
fi

mps_off

# 5. Counters of one model; more architectures; half precision.
if [ "$counting" != none ] && [ -n "$first" ]; then
  profile 05-counted 120 "$first" --batch 1,$batch --share 100 --collector "$counting"
fi
profile_each 05-profile 100 "$others" "$more_batches" "${timed[@]}"
if [ "$kind" = gpu ] && [ -n "$first" ]; then
  profile 05-float16 90 "$first" --precision float16 --batch $plain_batches "${timed[@]}"
fi

# 6. iGniter: what its coefficients need is measured while the daemon is there; the fit comes last, from the database.
if [ "$kind" = gpu ] && [ -n "$with_mps" ]; then
  mps_on
  for file in $(files "$shared"); do
    profile "06-igniter-$(basename "$file" .onnx)" 240 "$file" --igniter --collector "$timing"
    [ -n "$rest" ] || break
  done
fi
mps_off

# 7. Other shares, batches between, more counters, other collectors.
profile_each 07-batches 100 "${rest:+$others}" "$most_batches" "${timed[@]}"
if [ "$kind" = gpu ] && [ -n "$first" ]; then
  for collector in ${also//,/ }; do
    [ $collector = none ] || profile "07-with-$collector" 60 "$first" --batch $batch --share 100 --collector $collector
  done
  [ "$counting" = none ] ||
    profile_each 07-counted 100 "${rest:+$shared $others}" $batch --share 100 --collector "$counting"
fi

# What is kept, whatever the time: the database in one piece, and all of it in files that can be carried away.
limit=$((limit + tail_s + 60))
rm -f "$out"/{done,failed}/08-*
gpuprof 08-compact 60 db compact
size_mib=$(du -sm "$GPUPROF_DB" 2>/dev/null | cut -f1)
[ "${size_mib:-0}" -le 30 ] || echo "the database has $size_mib MiB, more than the 30 that are kept"
settings >"$out/settings-after.csv" 2>&1
# iGniter's fit, kept in the database's .calibrated, and how far its prediction and the other interference models' are off the co-locations measured here,
# each victim left out in turn: from the database, which needs no GPU and can be done again elsewhere.
[ "$kind" != gpu ] || gpuprof 08-calibrate 60 calibrate --device "$device"
# What the runtime's options and half precision gain; options whose answers differed from a plain session's were refused.
gpuprof 08-options 30 db sql "select model, precision, execution, batch, sm_share_pct, latency_p50_ms, power_w, h2d_bytes, d2h_bytes from latest_models where error is null order by model, batch, sm_share_pct, execution"
step 08-check 30 "$python" -m bench.gpu.check "$GPUPROF_DB"
# How far off estimates are on what was measured, each architecture left out. Where there is no time, it can be made of
# what is kept: gpuprof evaluate --db gpuprof-db --json >08-evaluate.log, and the page again.
gpuprof 08-evaluate 30 evaluate --regressors lasso,kernel_ridge,gradient_boosting --json
mkdir -p "$out/page"
gpuprof 08-page 60 report $(cd "$out" && ls -d gpuprof-db map.json load.json 2>/dev/null) -o page/report.html
rm -rf "$out/packed" && mkdir "$out/packed"
tar -C "$out" --exclude=./models --exclude=./site --exclude=./packed -cf - . | gzip -9 |
  split -b 15M - "$out/packed/gpu-run.tar.gz."
[ -z "${COPY_TO:-}" ] || { mkdir -p "$COPY_TO" && cp "$out"/packed/* "$COPY_TO"; }
echo "database ${size_mib:-0} MiB; packed: cat packed/gpu-run.tar.gz.* | tar xz"
echo "$(($(date +%s) - began)) s; what each step did: $out/steps.csv"
cmp -s "$out/settings-before.csv" "$out/settings-after.csv" && echo "the device's settings are as they were found" ||
  { echo "the device's settings CHANGED: compare $out/settings-before.csv and $out/settings-after.csv"; exit 1; }
