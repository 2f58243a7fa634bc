#!/usr/bin/env bash
# Puts ONNX Runtime's build for NVIDIA GPUs into a folder of its own, without CUDA's packages, for the tests that show
# that it runs nothing on the CPU under a GPU's name. It shares its module's name with the CPU build, so that it is in
# no environment. 250 MB to fetch, 350 MB on the disk: run it only where GPUPROF_ORT_GPU_TESTS is set or by hand.
# Never fails: where pip cannot fetch it, the tests are skipped and say so.
#
#   .ci/install-onnxruntime-gpu.sh [DIRECTORY [BIN]]     default: .venv/onnxruntime-gpu .venv/bin
set -uo pipefail
cd "$(dirname "$0")/.."
target=${1:-.venv/onnxruntime-gpu}
bin=${2:-.venv/bin}

[ -e "$target/onnxruntime/capi/libonnxruntime_providers_cuda.so" ] && { echo "onnxruntime-gpu is there: $target"; exit 0; }
timeout 900 "$bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --only-binary=:all: \
  --target "$target" onnxruntime-gpu || { rm -rf "$target"; echo "onnxruntime-gpu not installed: its tests are skipped"; exit 0; }
echo "onnxruntime-gpu installed: $target"
