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
