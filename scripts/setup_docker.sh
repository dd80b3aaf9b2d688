#!/usr/bin/env bash
# Make a Docker daemon answer on this machine, and bubblewrap beside it: what the sandbox tests need. Idempotent.
#
# Installs by apt what is missing (root only), starts a daemon if none answers, and waits until it is ready.
# SPARRING_DOCKER_ROOT (default /var/lib/sparring-docker) holds the data of a daemon that this script starts.
set -euo pipefail

root=${SPARRING_DOCKER_ROOT:-/var/lib/sparring-docker}
deadline_s=${SPARRING_DOCKER_DEADLINE_S:-60}

answers() { timeout 10 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }
have() { command -v "$1" >/dev/null 2>&1; }
fail() { echo "setup_docker: $*" >&2; exit 1; }

missing=()
have bwrap || missing+=(bubblewrap)
have debootstrap || missing+=(debootstrap)
answers || have dockerd || missing+=(docker.io iptables)
if ((${#missing[@]})); then
  [[ $(id -u) == 0 ]] || fail "missing: ${missing[*]}. Install them as root: apt-get install -y ${missing[*]}"
  have apt-get || fail "missing: ${missing[*]}, and there is no apt-get; install them with this system's package manager"
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

if ! answers; then
  [[ -z ${DOCKER_HOST:-} ]] || fail "DOCKER_HOST=$DOCKER_HOST does not answer; start that daemon or unset DOCKER_HOST"
  [[ $(id -u) == 0 ]] || fail "no daemon answers, and only root can start one: sudo $0"
  mkdir -p "$root"
  # What a killed daemon left: a process id that may be another program's by now keeps the next one from starting.
  rm -f "$root/pid" "$root/exec/containerd/containerd.pid"
  # No bridge and no firewall rules: sandboxes have no network, and a daemon in a container may not be allowed either.
  setsid nohup dockerd --data-root "$root/data" --exec-root "$root/exec" --pidfile "$root/pid" \
    -H unix:///var/run/docker.sock --iptables=false --ip-forward=false --ip-masq=false --bridge=none \
    --storage-driver="${SPARRING_DOCKER_STORAGE:-overlay2}" >"$root/log" 2>&1 </dev/null &
  end=$((SECONDS + deadline_s))
  until answers; do
    kill -0 $! 2>/dev/null || { tail -n 20 "$root/log" >&2; fail "the daemon ended; its log: $root/log"; }
    ((SECONDS < end)) || { tail -n 20 "$root/log" >&2; fail "no answer within ${deadline_s} s; its log: $root/log"; }
    sleep 0.2
  done
fi
echo "docker $(docker version --format '{{.Server.Version}} (API {{.Server.APIVersion}})'), $(bwrap --version)"
