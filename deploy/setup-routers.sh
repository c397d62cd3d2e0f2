#!/usr/bin/env bash
# Makes an environment with released routers of others, for the tests that run them before real servers. Quick
# when nothing changed. kvconnect is not in it: a router knows nodes by HTTP alone. Settings, from the environment:
#   PYTHON   the interpreter that it is made with      (default: python3)
#   ROUTERS  the releases                              (default: vllm-router==0.1.17 sglang-router==0.3.2)
#   VENV     where                                     (default: .venv-routers)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
ROUTERS=${ROUTERS:-vllm-router==0.1.17 sglang-router==0.3.2}
VENV=${VENV:-.venv-routers}

say() { echo "setup-routers: $*"; }

stamp=$VENV/.kvconnect-setup
wanted=$({ echo "$ROUTERS $PWD"; cat deploy/setup-routers.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
  say "making $VENV with $("$PYTHON" --version)"
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV"
fi
rm -f "$stamp"
say "installing $ROUTERS"
# shellcheck disable=SC2086  # several packages
"$VENV/bin/python" -m pip --disable-pip-version-check --no-input install -qq $ROUTERS
echo "$wanted" >"$stamp"
say "done: $ROUTERS in $VENV"
