#!/usr/bin/env bash
# Puts the distribution's nsight-systems (on Debian of the section non-free) below a directory and links its nsys into a
# bin directory, so that the tests that need the real one run. It comes from the sources that this machine has
# configured. Nothing of the system is changed, and it needs no root: packages are fetched with lists of their own and
# unpacked, without what they depend on.
# Never fails: where apt or the package is missing, the tests are skipped and say so.
#
#   .ci/install-nsys.sh [DIRECTORY [BIN]]     default: .venv/nsight-systems .venv/bin
set -uo pipefail
cd "$(dirname "$0")/.."
target=${1:-.venv/nsight-systems}
bin=${2:-.venv/bin}

skip() {
  echo "nsys not installed: $1; the tests that need it are skipped"
  exit 0
}

command -v nsys >/dev/null 2>&1 && { echo "nsys is there: $(command -v nsys)"; exit 0; }
[ -x "$target/nsys" ] && "$target/nsys" --version >/dev/null 2>&1 && { echo "nsys is there: $target/nsys"; exit 0; }
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null 2>&1 || skip "no $tool"
done
[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || skip "it is packaged for amd64"

work=$(mktemp -d) || skip "no temporary directory"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
options=(
  -qq
  -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User="
  -o "Acquire::Retries=2" -o "Acquire::http::Timeout=60"
)
timeout 300 apt-get "${options[@]}" update >/dev/null 2>&1 || skip "apt-get update failed"
(cd "$work" && timeout 600 apt-get "${options[@]}" download nsight-systems nsight-systems-target libssh-4 >/dev/null 2>&1) ||
  skip "the configured sources have no nsight-systems (on Debian: non-free), or it cannot be fetched"
for package in "$work"/*.deb; do
  dpkg-deb -x "$package" "$work/root" || skip "$package cannot be unpacked"
done
rm -rf "$target"
mkdir -p "$target" "$bin"
cp -a "$work/root/." "$target/" || skip "no space for it (600 MB)"
# A wrapper, not a link: nsys looks for its parts beside the name that it was called by.
cat > "$target/nsys" <<WRAPPER
#!/bin/sh
exec "$(realpath "$target")/usr/lib/nsight-systems/target-linux-x64/nsys" "\$@"
WRAPPER
chmod +x "$target/nsys"
"$target/nsys" --version >/dev/null 2>&1 || { rm -rf "$target"; skip "it does not run here"; }
ln -sf "$(realpath "$target")/nsys" "$bin/nsys"
echo "nsys installed: $("$target/nsys" --version)"
