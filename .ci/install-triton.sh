#!/usr/bin/env bash
# Unpacks Triton's own server from the package nvidia-pytriton into a folder of its own, for the test that lets it read
# an exported repository. It runs without a GPU; it brings no backend for ONNX. 55 MB to fetch: run it only where
# GPUPROF_TRITON_TESTS is set or by hand. Never fails: where pip cannot fetch it, the test is skipped and says so.
#
#   .ci/install-triton.sh [DIRECTORY [BIN]]     default: .venv/triton .venv/bin
set -uo pipefail
cd "$(dirname "$0")/.."
target=${1:-.venv/triton}
bin=${2:-.venv/bin}

[ -x "$target/pytriton/tritonserver/bin/tritonserver" ] && { echo "Triton is there: $target"; exit 0; }
timeout 900 "$bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --only-binary=:all: \
  --target "$target" nvidia-pytriton || { rm -rf "$target"; echo "Triton not installed: its test is skipped"; exit 0; }
chmod +x "$target/pytriton/tritonserver/bin/tritonserver"
echo "Triton installed: $target"
