#!/usr/bin/env bash
# Puts NVIDIA's perf_analyzer (PyPI) below a directory and links it into a bin directory, so that the test that lets it
# drive the server runs. It is built for glibc 2.38: where the system's is older, the libraries of a newer suite are
# unpacked beside it and it is started with those, if the sources that this machine has configured offer one. Nothing of
# the system is changed, and it needs no root.
# Never fails: where pip or apt cannot fetch something, the test is skipped and says so.
#
#   .ci/install-perf-analyzer.sh [DIRECTORY [BIN]]     default: .venv/perf-analyzer .venv/bin
set -uo pipefail
cd "$(dirname "$0")/.."
target=${1:-.venv/perf-analyzer}
bin=${2:-.venv/bin}
version=2.60.0
platform=manylinux_2_38_x86_64

skip() {
  echo "perf_analyzer not installed: $1; the test that needs it is skipped"
  exit 0
}

works() { "$1" --version >/dev/null 2>&1; }

works "$bin/perf_analyzer" && { echo "perf_analyzer is there: $bin/perf_analyzer"; exit 0; }
[ "$(uname -sm)" = "Linux x86_64" ] || skip "it is built for Linux on x86-64"

work=$(mktemp -d) || skip "no temporary directory"
trap 'rm -rf "$work"' EXIT
timeout 300 "$bin/python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
  --platform "$platform" --dest "$work" "perf-analyzer==$version" >/dev/null 2>&1 || skip "pip cannot fetch $version"
mkdir -p "$target" && target=$(cd "$target" && pwd) || skip "no directory $target"
"$bin/python" -m zipfile -e "$work"/perf_analyzer-*.whl "$target" || skip "the wheel cannot be unpacked"
program=$target/perf_analyzer/bin/perf_analyzer
chmod +x "$program"

if ! works "$program"; then
  for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null 2>&1 || skip "the system's glibc is too old, and there is no $tool to fetch another"
  done
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$target/libraries"
  options=(
    -qq
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User="
    -o "Acquire::Retries=2" -o "Acquire::http::Timeout=60"
  )
  timeout 300 apt-get "${options[@]}" update >/dev/null 2>&1 || skip "apt-get update failed"
  (cd "$work" && timeout 300 apt-get "${options[@]}" download libc6 libgcc-s1 libssl3t64 libstdc++6 libzstd1 zlib1g \
    >/dev/null 2>&1) || skip "the configured sources offer no libraries to fetch"
  for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$target/libraries" || skip "$(basename "$package") cannot be unpacked"
  done
  libraries=$target/libraries/usr/lib/x86_64-linux-gnu
  program=$target/with-its-libraries
  printf '#!/bin/sh\nexec "%s" --library-path "%s" "%s" "$@"\n' \
    "$libraries/ld-linux-x86-64.so.2" "$libraries" "$target/perf_analyzer/bin/perf_analyzer" > "$program"
  chmod +x "$program"
  works "$program" || skip "it does not start with the libraries of the configured sources"
fi
ln -sf "$program" "$bin/perf_analyzer"
echo "perf_analyzer $version installed: $program"
