#!/usr/bin/env bash
# Makes an environment with SGLang on a CPU and kvconnect beside it, for the tests against real servers. SGLang
# publishes no CPU build: its Python runs without its native modules once their few operators that a CPU needs are
# there (tests/sglang/stand_ins). Quick when nothing changed. Takes about 4 GB of disk. Settings, all from the
# environment:
#   PYTHON  the interpreter that it is made with      (default: python3)
#   SGLANG  the release                               (default: 0.5.23)
#   TORCH   what is installed as torch                (default: torch==2.13.0)
#   VENV    where                                     (default: .venv-sglang for the default release,
#                                                      .venv-sglang-RELEASE for others)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
SGLANG=${SGLANG:-0.5.23}
VENV=${VENV:-$([ "$SGLANG" = 0.5.23 ] && echo .venv-sglang || echo ".venv-sglang-$SGLANG")}
TORCH=${TORCH:-torch==2.13.0}

. deploy/environment.sh
exit_if_unchanged "$TORCH $SGLANG" pyproject.toml
missing=()
find_compilers
install_missing
make_venv
say "installing $TORCH, and kvconnect with both engines"
pip install -qq "$TORCH"
pip install -qq -e ".[mooncake-cpu,nixl,node]" "$TORCH" pytest pytest-timeout pytest-xdist hypothesis
# SGLang's own requirements are gigabytes of CUDA; torchvision's native library does not fit a CPU build of torch.
say "installing sglang $SGLANG and what it needs of its requirements"
pip install -qq "$TORCH" transformers==5.19.0 triton==3.9.0 \
  aiohttp blobfile compressed-tensors datasets distro einops fastapi gguf interegular IPython llguidance \
  mistral_common msgspec ninja numba nvidia-ml-py openai==2.8.0 openai-harmony orjson outlines==0.1.11 \
  partial_json_parser prometheus-client psutil pybase64 python-multipart pyzmq requests scipy sentencepiece \
  setproctitle soundfile tiktoken timm uvicorn uvloop watchfiles xgrammar==0.2.7 xxhash zstandard anthropic \
  apache-tvm-ffi==0.1.11 "kernels<0.15"
pip install -qq --no-deps "sglang==$SGLANG" torchvision==0.28.0 sglang-router==0.3.2
# Now, since a server would compile it while its first request waits.
say "compiling SGLang's hash of pages"
"$VENV/bin/python" -c 'import tests.sglang.stand_ins.sitecustomize
from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash
get_native_hash([1, 2], None, 1)' >/dev/null
finished "sglang $SGLANG in $VENV"
