"""Files with secrets: read only where no other user can, and made so that no other user ever could."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from kvconnect.errors import ConfigError

MIN_SECRET_CHARACTERS = 32
_LONGEST = 4096


def new_secret() -> str:
    """A secret that cannot be guessed, as text."""
    return secrets.token_urlsafe(32)


def checked_secret(text: str, field: str) -> str:
    """A secret without the white space around it. Raises ``ConfigError`` if it could be guessed."""
    text = text.strip()
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"{field} has {len(text)} characters, accepted: {MIN_SECRET_CHARACTERS} and more; "
            "`kvconnect keys new` makes one"
        )
    return text


def read_secret(path: Path, field: str) -> str:
    """The text of a file that only its owner can read. Raises ``ConfigError`` that names ``field``.

    A group may read what belongs to root: so a service manager hands a secret to a service.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _check_owner_and_mode(os.fstat(descriptor), f"{field} is {str(path)!r}")
            data = file.read(_LONGEST)
        return data.decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field} is {str(path)!r}, which cannot be read: {error}") from error


def _check_owner_and_mode(status: os.stat_result, what: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{what}, which is not a file")
    allowed = 0o740 if status.st_uid == 0 else 0o700
    if mode & ~allowed:
        raise ConfigError(f"{what}, whose mode is {mode:04o}: others can use it; accepted: 0600 (chmod 600)")
    if os.geteuid() not in (0, status.st_uid) and status.st_uid != 0:
        raise ConfigError(f"{what}, which belongs to user {status.st_uid}; accepted: this user's, or root's")


def write(path: Path, text: str, *, mode: int = 0o600, replace: bool = False) -> bool:
    """Make a file with its whole content at once; False if there is one that is not to be replaced."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(text.rstrip("\n") + "\n")
                file.flush()
                os.fsync(descriptor)
            (os.rename if replace else os.link)(made, path)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    return True


def user_key_path(environ: Mapping[str, str]) -> Path:
    """Where the key of this user lies, with which its own nodes on this machine know each other."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and Path(runtime).stat().st_uid == os.geteuid():
        return Path(runtime) / "kvconnect" / "key"
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".config")
    return Path(config) / "kvconnect" / "key"


def user_key(environ: Mapping[str, str]) -> tuple[str, Path]:
    """The key of this user, made if there is none, and where it lies. Raises ``ConfigError``.

    Two processes that make it at once end up with the same one.
    """
    path = user_key_path(environ)
    field = "the key of this user"
    if not path.exists():
        write(path, new_secret())
    return checked_secret(read_secret(path, field), field), path
