#!/usr/bin/env bash
# Builds the Containerfile's image for machines without a GPU, with podman, buildah or docker, whichever is there first.
# Where no registry has the base image to give, buildah and debootstrap make one of Debian's own packages.
#
#   .ci/build-image.sh [TAG [BASE]]     default: localhost/gpuprof-test, and the base that the Containerfile names
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:-localhost/gpuprof-test}
base=${2:-}
builder=$(command -v podman || command -v buildah || command -v docker) || { echo "no podman, buildah or docker"; exit 3; }

# buildah alone brings no runtime for containers; without one it builds in a changed root.
command -v crun > /dev/null || command -v runc > /dev/null || export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}

# What pip and TLS are told on this machine holds while the image is built, too, and does not stay in it.
mounts=()
for file in /etc/pip.conf /etc/ssl/certs "${SSL_CERT_FILE:-}"; do
  [ -n "$file" ] && [ -e "$file" ] && mounts+=(--volume "$file:$file:ro")
done
build() {
  local words=(build --network host --tag "$tag" --build-arg EXTRAS=cpu,serve -f Containerfile)
  [ "$(basename "$builder")" = docker ] || words+=("${mounts[@]}")
  [ -z "$base" ] || words+=(--build-arg "BASE=$base")
  "$builder" "${words[@]}" .
}

if [ -z "$base" ] && [ "$(basename "$builder")" = buildah ] && command -v debootstrap > /dev/null &&
  ! timeout 60 "$builder" pull --quiet "$(sed -n 's/^ARG BASE=//p' Containerfile)" > /dev/null 2>&1; then
  base=localhost/gpuprof-base
  echo "no registry has the base: making $base of Debian's packages"
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  . /etc/os-release
  # A system has one of the two files; sed ends with 2 for the other.
  mirror=$({ sed -n 's/^URIs: *//p; s/^deb \([^[ ]*\) .*/\1/p' /etc/apt/sources.list.d/debian.sources \
    /etc/apt/sources.list 2> /dev/null || true; } | head -1)
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$VERSION_CODENAME" "$root" ${mirror:+"$mirror"} > "$root.log" || { tail -5 "$root.log"; exit 1; }
  container=$("$builder" from scratch)
  "$builder" copy --quiet "$container" "$root" / > /dev/null
  "$builder" commit --quiet "$container" "$base" > /dev/null
  "$builder" rm "$container" > /dev/null
fi
build
