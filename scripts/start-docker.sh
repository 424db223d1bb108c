#!/bin/bash
# Start Docker on a Debian machine without Docker: see --help.
set -euo pipefail

SUITE=trixie # Debian 13: Docker Engine 26.1 and Compose 2.26, the oldest that docker-compose.yml can use
PACKAGES=ca-certificates,docker.io,docker-cli,docker-compose,docker-buildx,iptables
MIRROR=${MIRROR:-http://deb.debian.org/debian}
START_LIMIT_S=120
STOP_LIMIT_S=120
SOCKET=/var/run/docker.sock

usage() {
  cat <<HELP
usage: scripts/start-docker.sh [FOLDER]          start Docker Engine and Compose on this machine
       scripts/start-docker.sh --stop [FOLDER]   stop them; images and volumes stay in FOLDER

For a Debian machine (12 or newer) that has no Docker, such as a machine for tests. Run it as root. On any other machine
install Docker as usual: https://docs.docker.com/engine/install/

All that it installs lies in FOLDER (default: build/docker), except debootstrap, which apt installs. FOLDER has Docker's
packages from Debian 13, images, volumes and the engine's log. The engine listens at $SOCKET and can mount every
folder of this machine except those in /usr. The first start downloads some 200 MB; a later start takes seconds.
FOLDER/bin has \`docker\` with its plugins compose and buildx: put it first on PATH.
After a stop, the network interface docker0 and Docker's rules in iptables stay until the machine restarts.

If root may not raise resource limits here (no CAP_SYS_RESOURCE, as in many containers), the engine ignores the ulimits of
containers.

MIRROR=URL takes Debian's packages from another address than $MIRROR.
HELP
}

fail() {
  echo "$1" >&2
  exit 1
}

# Print a script that runs one of Debian 13's programs, which need Debian 13's libraries: in a separate mount namespace, where
# FOLDER's /usr lies over the machine's.
in_debian_13() {
  cat <<PROGRAM
#!/bin/sh
exec unshare --mount sh -c 'mount --bind "\$0" /usr && exec "\$@"' '$folder/debian/usr' $1 "\$@"
PROGRAM
}

install_docker() {
  if ! command -v debootstrap >/dev/null; then
    echo "Installing debootstrap …"
    { apt-get install --yes --quiet debootstrap || { apt-get update && apt-get install --yes --quiet debootstrap; }; } \
      >"$folder/install.log" 2>&1 || fail "apt-get cannot install debootstrap: see $folder/install.log"
  fi
  echo "Installing Docker into $folder/debian: this takes some minutes …"
  rm -rf "$folder/debian"
  debootstrap --variant=minbase --include="$PACKAGES" "$SUITE" "$folder/debian" "$MIRROR" >"$folder/install.log" 2>&1 \
    || fail "debootstrap failed: see $folder/install.log"
}

write_programs() {
  mkdir -p "$folder/bin" "$folder/engine"
  in_debian_13 /usr/bin/docker >"$folder/bin/docker"
  in_debian_13 /usr/sbin/dockerd >"$folder/engine/start"
  chmod +x "$folder/bin/docker" "$folder/engine/start"
  ln -sf /usr/sbin/iptables-nft "$folder/engine/iptables" # in /usr/sbin these names lead to /etc, which is the machine's
  ln -sf /usr/sbin/ip6tables-nft "$folder/engine/ip6tables"
  rm -f "$folder/engine/runc"
  if (($((0x$(awk '/^CapEff/ { print $2 }' /proc/self/status))) >> 24 & 1)); then
    return # CAP_SYS_RESOURCE: limits can be raised
  fi
  cat >"$folder/engine/runc" <<'RUNC'
#!/bin/bash
# runc without the limits that root may not raise here. Engine and build find it before /usr/sbin/runc.
previous=
for argument; do
  case $previous in
    --bundle | -b) specification=$argument/config.json ;;
    --process | -p) specification=$argument ;;
  esac
  [ ! -f "${specification:-}" ] || sed -i -E 's/,"rlimits":\[[^]]*\]//; s/,"oomScoreAdj":-?[0-9]+//' "$specification"
  specification=
  previous=$argument
done
exec /usr/sbin/runc "$@"
RUNC
  chmod +x "$folder/engine/runc"
}

start() {
  [ "$(id -u)" = 0 ] || fail "Run this as root: it starts a Docker Engine."
  # shellcheck source=/dev/null
  (. /etc/os-release && [ "${ID:-}" = debian ] && ((${VERSION_ID:-13} >= 12))) 2>/dev/null \
    || fail "This needs Debian 12 or newer. Install Docker as usual: https://docs.docker.com/engine/install/"
  mkdir -p "$folder"
  [ -x "$folder/bin/docker" ] || install_docker
  write_programs
  ! "$folder/bin/docker" --host "unix://$SOCKET" info >/dev/null 2>&1 || fail "A Docker Engine runs already, at $SOCKET."
  PATH=$folder/engine:/usr/sbin:/usr/bin setsid "$folder/engine/start" --host "unix://$SOCKET" --data-root "$folder/data" \
    --pidfile "$folder/engine/pid" >"$folder/engine.log" 2>&1 </dev/null &
  engine=$!
  trap 'kill "$engine" 2>/dev/null || :' EXIT # unless it answers
  local deadline_s=$((SECONDS + START_LIMIT_S))
  until "$folder/bin/docker" --host "unix://$SOCKET" info >/dev/null 2>&1; do
    kill -0 "$engine" 2>/dev/null || fail "The engine ended: see $folder/engine.log"
    ((SECONDS < deadline_s)) || fail "The engine does not answer after $START_LIMIT_S s: see $folder/engine.log"
    sleep 0.5
  done
  trap - EXIT
  "$folder/bin/docker" version --format 'Docker Engine {{.Server.Version}} runs.'
  "$folder/bin/docker" compose version
  echo "Use it:   export PATH=$folder/bin:\$PATH"
  echo "Stop it:  $0 --stop $folder"
}

stop() {
  local pid
  pid=$(cat "$folder/engine/pid" 2>/dev/null) || fail "No engine of $folder runs."
  grep --quiet dockerd "/proc/$pid/comm" 2>/dev/null || fail "No engine of $folder runs; process $pid is gone."
  kill "$pid"
  local deadline_s=$((SECONDS + STOP_LIMIT_S))
  while kill -0 "$pid" 2>/dev/null; do
    ((SECONDS < deadline_s)) || fail "The engine (process $pid) still runs after $STOP_LIMIT_S s: see $folder/engine.log"
    sleep 0.5
  done
  echo "Docker Engine has stopped."
}

action=start
case ${1:-} in
  -h | --help) usage && exit ;;
  --stop) action=stop && shift ;;
  -*) usage >&2 && exit 2 ;;
esac
folder=$(realpath -m "${1:-$(dirname "$0")/../build/docker}")
$action
