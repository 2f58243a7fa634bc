#!/usr/bin/env bash
# Puts @grpc/grpc-js (npm) below a directory, so that the test that lets it ask the server runs. Nothing of the system is
# changed. Never fails: where there is no npm, or it cannot fetch something, the test is skipped and says so.
#
#   .ci/install-grpc-js.sh [DIRECTORY]     default: .venv/grpc-js
set -uo pipefail
cd "$(dirname "$0")/.."
target=${1:-.venv/grpc-js}

skip() {
  echo "@grpc/grpc-js not installed: $1; the test that needs it is skipped"
  exit 0
}

[ -d "$target/node_modules/@grpc/grpc-js" ] && { echo "@grpc/grpc-js is there: $target"; exit 0; }
command -v npm >/dev/null 2>&1 || skip "there is no npm"
mkdir -p "$target" || skip "no directory $target"
timeout 300 npm install --silent --no-audit --no-fund --prefix "$target" "@grpc/grpc-js@1.14.7" "@grpc/proto-loader@0.8.1" \
  >/dev/null 2>&1 || { rm -rf "$target"; skip "npm cannot fetch it"; }
echo "@grpc/grpc-js installed: $target"
