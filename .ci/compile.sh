#!/usr/bin/env bash
# Compiles the machine code of planner and simulator and keeps it where they look for it, by planning for a
# small network. Never fails: what is not compiled here is compiled by the first that needs it.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 0
printf 'model,rate_rps,slo_ms,file\nmlp,1000,20,mlp.onnx\n' > slo.csv
{
  "$python" -m gpuprof zoo build mlp -o mlp.onnx &&
    "$python" -m gpuprof place --slo-file slo.csv --gpus a100-40 -o map.json &&
    "$python" -m gpuprof.simulator.engine
} > compile.log 2>&1 || { echo "not compiled beforehand:"; tail -3 compile.log; }
exit 0
