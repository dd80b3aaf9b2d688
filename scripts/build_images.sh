#!/usr/bin/env bash
# Build the sandbox images without a hub: a debootstrap base, then every folder of sandbox/images on top. Idempotent.
#
# An image is rebuilt when its folder or its base changed; `--force` rebuilds all. The base's root file system stays in
# SPARRING_ROOTFS (default /var/lib/sparring/rootfs), where bubblewrap can use it too. With SPARRING_BASE set to an image
# that the daemon has (such as debian:bookworm-slim with python3, git and patch), nothing is bootstrapped.
set -euo pipefail
cd "$(dirname "$0")/.."

rootfs=${SPARRING_ROOTFS:-/var/lib/sparring/rootfs}
base=${SPARRING_BASE:-sparring/base:bookworm}
force=${1:-}

fail() { echo "build_images: $*" >&2; exit 1; }
label() { docker image inspect --format '{{index .Config.Labels "sparring.source"}}' "$1" 2>/dev/null || true; }

timeout 10 docker version >/dev/null 2>&1 || fail "no Docker daemon answers; run scripts/setup_docker.sh first"

if [[ ! -d $rootfs && -z ${SPARRING_BASE:-} ]]; then
  [[ $(id -u) == 0 ]] || fail "debootstrap needs root: sudo $0"
  mkdir -p "$(dirname "$rootfs")"
  staging=$(mktemp -d "$rootfs.XXXXXX")
  trap 'rm -rf "$staging"' EXIT
  debootstrap --variant=minbase --include=python3,python3-pytest,git,patch,ca-certificates,procps bookworm "$staging"
  rm -rf "$staging"/var/cache/apt/archives/* "$staging"/var/lib/apt/lists/*
  chmod 755 "$staging"
  mv "$staging" "$rootfs"
  trap - EXIT
fi
if ! docker image inspect "$base" >/dev/null 2>&1; then
  [[ -z ${SPARRING_BASE:-} ]] || fail "the daemon has no image $base (SPARRING_BASE)"
  tar -C "$rootfs" -c . | docker import - "$base" >/dev/null
  echo "$base: imported"
fi

base_id=$(docker image inspect --format '{{.Id}}' "$base")
for folder in sandbox/images/*/; do
  name=sparring/$(basename "$folder"):latest
  source=$( (echo "$base_id"; find "$folder" -type f -not -path '*/__pycache__/*' | LC_ALL=C sort | xargs sha256sum) | sha256sum | cut -c1-16)
  if [[ $force != --force && $(label "$name") == "$source" ]]; then
    echo "$name: up to date"
    continue
  fi
  docker build --quiet --network none --build-arg BASE="$base" --label sparring.source="$source" -t "$name" "$folder" >/dev/null
  echo "$name: built"
done
