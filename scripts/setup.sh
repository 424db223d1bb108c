#!/usr/bin/env bash
# Prepare .venv for `run`, `unit` or `test`; does nothing if that has been done for these very requirements.
set -euo pipefail
cd "$(dirname "$0")/.."

profile="${1:?usage: scripts/setup.sh run|unit|test}"
case "$profile" in
  run) lock=requirements/worker.txt ;;
  unit | test) lock=requirements/dev.txt ;;
  *) echo "usage: scripts/setup.sh run|unit|test" >&2; exit 2 ;;
esac

apt_install() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
  if ! command -v apt-get >/dev/null; then
    echo "Please install $* with your system's package manager, then run this again." >&2
    exit 1
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

find_python() {
  local name
  for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "Spillway needs Python 3.11 or newer; set PYTHON to one." >&2
  exit 1
}

make_venv() {
  local python
  python="$(find_python)"
  # Debian keeps ensurepip in a package of its own.
  "$python" -c 'import ensurepip' 2>/dev/null || apt_install python3-venv
  "$python" -m venv .venv
}

# The tests run these for real: a private PostgreSQL, the load balancer's configuration in its own parser, a browser, the
# compiler of the engine's attention.
install_servers_for_tests() {
  local missing=()
  command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=(postgresql)
  command -v haproxy >/dev/null || [ -x /usr/sbin/haproxy ] || missing+=(haproxy)
  command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
  command -v gcc >/dev/null && [ -e /usr/include/math.h ] || missing+=(gcc libc6-dev)
  if [ "${#missing[@]}" -gt 0 ]; then
    echo "Installing for the tests: ${missing[*]}"
    apt_install "${missing[@]}"
  fi
}

# Debian's package would start a server, too: only the program that checks rules and their tests is taken out of it.
fetch_promtool() {
  if [ -x .venv/tools/promtool ] || command -v promtool >/dev/null; then return; fi
  if ! command -v dpkg-deb >/dev/null; then
    echo "promtool is not installed: the tests of deploy/prometheus will be skipped." >&2
    return
  fi
  local folder
  folder="$(mktemp -d)"
  echo "Fetching promtool for the tests"
  (
    cd "$folder"
    apt-get download -qq -o APT::Sandbox::User=root prometheus
    dpkg-deb --extract prometheus_*.deb .
  )
  mkdir -p .venv/tools
  mv "$folder/usr/bin/promtool" .venv/tools/
  rm -rf "$folder"
}

install_node_packages() {
  if [ "$profile" = test ]; then .venv/bin/python scripts/install_node_packages.py tests/clients/node; fi
}

stamp=".venv/.spillway-${profile/unit/test}"  # what pip installs is the same for both
want="$(cat "$lock" pyproject.toml scripts/install_torch.py scripts/setup.sh | sha256sum) ${SPILLWAY_TORCH:-}"
if [ "$profile" = test ]; then
  install_servers_for_tests
  fetch_promtool
fi
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  install_node_packages
  exit 0
fi

echo "Preparing .venv for '$profile' (a few minutes the first time)"
[ -x .venv/bin/python ] || make_venv
# The lock leaves torch out on purpose: requirements/README.md.
.venv/bin/python scripts/install_torch.py
.venv/bin/python -m pip install --disable-pip-version-check --require-hashes --no-deps -r "$lock"
.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
echo "$want" >"$stamp"
install_node_packages
