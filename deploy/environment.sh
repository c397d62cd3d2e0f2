# shellcheck shell=bash
# Sourced by the scripts beside it, in the root of the project, with VENV set: makes that virtual environment again when
# what it is made from has changed.

say() { echo "$(basename "$0" .sh): $*"; }

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# exit_if_unchanged SETTINGS FILE...: ends the script if the environment was made from the same before.
exit_if_unchanged() {
  stamp=$VENV/.kvconnect-setup
  wanted=$({ echo "$1 $PWD"; cat "${@:2}" "deploy/$(basename "$0")" deploy/environment.sh; } | sha256sum | cut -d' ' -f1)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$VENV/bin/python" -c '' 2>/dev/null; then exit 0; fi
}

# The environment with pip alone, unless one with pip is there; it is unfinished until `finished`.
make_venv() {
  if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    say "making $VENV with $("$PYTHON" --version)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
  fi
  rm -f "$stamp"
}

# finished TEXT: whatever the environment is made from is in it, as the text says.
finished() {
  echo "$wanted" >"$stamp"
  say "done: $*"
}

# Adds to `missing` the packages that SGLang compiles the hash of its pages with, at the first use.
find_compilers() {
  command -v g++ >/dev/null || missing+=(g++)
  local headers
  headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [ -e "$headers/Python.h" ] || missing+=(python3-dev)
  compgen -G '/usr/include/openssl/sha.h' >/dev/null || missing+=(libssl-dev)
}

# Installs the system packages in `missing`, as root with apt-get; else says what to do.
install_missing() {
  if [ ${#missing[@]} -eq 0 ]; then
    say "system packages: all there"
  elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "system packages: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    say "system packages: ${missing[*]} missing, and only root with apt-get can install them here;" \
      "run: sudo apt-get update && sudo apt-get install ${missing[*]}   (going on without)" >&2
  fi
}
