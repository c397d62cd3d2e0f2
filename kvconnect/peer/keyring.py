"""The keys of a node: its CURVE key pair, the public keys of its peers, and the secret that signs handles.

A file with a secret is refused if other users can read it, and is never readable for them while it is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.allow_list import AllowList

logger = logging.getLogger(__name__)

KEY_VARIABLE = "KVCONNECT_KEY"
KEYS_DIR_VARIABLE = "KVCONNECT_KEYS_DIR"
NODE_KEY = "node.key"
CLUSTER_KEY = "cluster.key"
PEERS = "peers"
PEER_SUFFIX = ".json"
KEY_BYTES = 32
MIN_SECRET_CHARACTERS = 32
_LONGEST = 4096
_SETTLED_NS = 1_000_000_000
"""A folder changed more recently is read again: changes in quick succession may have the same mtime."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


class PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's public key in hex, and the addresses at which it listens if this node fetches from it.

    ``addresses`` are in the notation of ``allow_peers``.
    """

    public_key: str
    addresses: tuple[str, ...] = ()


class SharedKeys:
    """Keys that every node of a small cluster derives from one secret. ``source`` names its place, for logs.

    A node uses the pair ``server`` on connections that peers open, and ``client`` on those that it opens.
    """

    def __init__(self, secret: str, source: str) -> None:
        self.server = key_pair(derive(secret, "curve server"))
        self.client = key_pair(derive(secret, "curve client"))
        self.handle_secret = derive(secret, "handles")
        self.receipt_secret = derive(secret, "receipts")
        self._source = source

    def server_key(self, host: str, port: int) -> bytes | None:
        """The public key that the peer at an address must have; None if it is not known."""
        return self.server.public

    def knows(self, public: bytes) -> bool:
        """Whether a client with this public key may connect."""
        return hmac.compare_digest(public, self.client.public)

    def describe(self) -> str:
        """A text by which an operator compares the keys of two nodes; it has no secrets."""
        return f"shared key {fingerprint(self.server.public)} from {self._source}"


class NodeKeys:
    """A node's own key pair, and the public keys of its peers, in a folder.

    The folder has ``node.key`` (secret key, in hex), ``cluster.key`` (the secret that signs handles, the
    same on all nodes) and ``peers/NAME.json`` (``PeerFile``). A peer without addresses listens at the host
    NAME. Peers that are added, replaced or removed while the node runs take effect at the next handshake.
    Raises ``ConfigError``: a file is missing, wrong, or readable by other users.
    """

    def __init__(self, folder: Path, field: str) -> None:
        self.folder = folder
        where = f"{field}: {NODE_KEY}"
        self.server = self.client = key_pair(key_bytes(read_secret(folder / NODE_KEY, where), where))
        where = f"{field}: {CLUSTER_KEY}"
        secret = checked_secret(read_secret(folder / CLUSTER_KEY, where), where)
        self.handle_secret = derive(secret, "handles")
        self.receipt_secret = derive(secret, "receipts")
        self._seen = self._state()
        self._take(read_peers(folder))

    def server_key(self, host: str, port: int) -> bytes | None:
        """The public key of the first peer, in order of names, that has this address; None if none has."""
        self._refresh()
        return next((public for addresses, public in self._servers if addresses.allows(host, port)), None)

    def knows(self, public: bytes) -> bool:
        """Whether the folder has a peer with this public key."""
        self._refresh()
        return public in self._known

    def describe(self) -> str:
        """As for ``SharedKeys``."""
        return f"node key {fingerprint(self.server.public)} from {self.folder}"

    def _take(self, peers: Mapping[str, PeerFile]) -> None:
        self._known = {bytes.fromhex(peer.public_key) for peer in peers.values()}
        self._servers = [
            (AllowList(peer.addresses or (name,), f"{PEERS}/{name}"), bytes.fromhex(peer.public_key))
            for name, peer in peers.items()
        ]

    def _state(self) -> int | None:
        """The folder's mtime in ns; None while another change might not alter it; 0 without a folder."""
        try:
            changed_at_ns = (self.folder / PEERS).stat().st_mtime_ns
        except OSError:
            return 0
        return changed_at_ns if time.time_ns() - changed_at_ns > _SETTLED_NS else None

    def _refresh(self) -> None:
        state = self._state()
        if state is not None and state == self._seen:
            return
        self._seen = state
        try:
            self._take(read_peers(self.folder))
        except ConfigError as error:
            # The peers read before stay. The folder is read again when it changes.
            logger.error("the keys of peers stay as they were, as their folder cannot be read: %s", error)


Keyring = SharedKeys | NodeKeys


def described(keyring: Keyring | None) -> str:
    """A keyring in one line, for people; None is the insecure mode."""
    return keyring.describe() if keyring else "insecure: neither authenticated nor encrypted"


def names_key(extra: ExtraConfig, environ: Mapping[str, str]) -> bool:
    """Whether a key is configured: without peers, a node uses none that is not."""
    return bool(
        extra.key_file or extra.keys_dir or environ.get(KEY_VARIABLE) or environ.get(KEYS_DIR_VARIABLE)
    )


def load_keyring(extra: ExtraConfig, environ: Mapping[str, str]) -> Keyring | None:
    """The configured keys, or this user's key if all configured addresses are on this machine.

    None if the configuration sets ``insecure``. Raises ``ConfigError``: keys are missing or wrong.
    """
    where = "kv_connector_extra_config"
    if extra.insecure:
        return None
    if extra.key_file:
        field = f"{where}.key_file"
        path = Path(extra.key_file).expanduser()
        return SharedKeys(checked_secret(read_secret(path, field), field), str(path))
    if extra.keys_dir:
        return NodeKeys(Path(extra.keys_dir).expanduser(), f"{where}.keys_dir")
    text, folder = environ.get(KEY_VARIABLE, ""), environ.get(KEYS_DIR_VARIABLE, "")
    if text and folder:
        raise ConfigError(
            f"the environment has {KEY_VARIABLE} and {KEYS_DIR_VARIABLE}; accepted: one of them"
        )
    if text:
        return SharedKeys(checked_secret(text, KEY_VARIABLE), f"the environment's {KEY_VARIABLE}")
    if folder:
        return NodeKeys(Path(folder).expanduser(), KEYS_DIR_VARIABLE)
    if far := extra.far_addresses:
        raise ConfigError(
            f"{where}.host or bind is {far[0]!r}, and the side channel has no key: make one with `kvconnect "
            f"keys new FILE`, copy it to every node, and give it as {where}.key_file or in {KEY_VARIABLE}; "
            "or give each node a key of its own (`kvconnect keys --help`)"
        )
    secret, path = user_key(environ)
    return SharedKeys(secret, str(path))


def read_peers(folder: Path) -> dict[str, PeerFile]:
    """The peers of a node by name, sorted. Raises ``ConfigError``: a file is no peer file."""
    peers = {}
    for path in sorted((folder / PEERS).glob(f"*{PEER_SUFFIX}")):
        try:
            peer = msgspec.json.decode(path.read_bytes(), type=PeerFile)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} is not a peer's public key: {error}") from error
        key_bytes(peer.public_key, f"{path}: public_key")
        AllowList(peer.addresses, f"{path}: addresses")
        peers[path.name.removesuffix(PEER_SUFFIX)] = peer
    return peers


def key_bytes(text: str, field: str) -> bytes:
    """A key from its 64 hexadecimal digits. Raises ``ConfigError``."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{field} is not a key; accepted: {2 * KEY_BYTES} hexadecimal digits")
    return key


def key_pair(secret: bytes) -> KeyPair:
    """The key pair of a secret key of 32 bytes."""
    import zmq
    from zmq.utils import z85

    return KeyPair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def new_key_pair() -> KeyPair:
    """A new random pair."""
    # Imported here, as above: the command line imports this module for every command.
    import zmq
    from zmq.utils import z85

    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public), z85.decode(secret))


def fingerprint(public: bytes) -> str:
    """A short name of a public key, for people who compare two."""
    return hashlib.sha256(public).hexdigest()[:16]


def derive(secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose from a secret: HKDF (RFC 5869) with SHA-256."""
    extracted = hmac.digest(b"kvconnect 1", secret.encode(), "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def new_secret() -> str:
    """A secret that cannot be guessed, as text."""
    return secrets.token_urlsafe(32)


def checked_secret(text: str, field: str) -> str:
    """A secret without surrounding white space. Raises ``ConfigError``: it is too short."""
    text = text.strip()
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"{field} has {len(text)} characters, accepted: {MIN_SECRET_CHARACTERS} and more; "
            "`kvconnect keys new` makes one"
        )
    return text


def read_secret(path: Path, field: str) -> str:
    """The text of a file that only its owner can read. Raises ``ConfigError``, which names ``field``.

    A file of root may be readable for its group: service managers hand secrets to services that way.
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
    """Create a file atomically. False: the file exists and ``replace`` is off. Raises ``ConfigError``."""
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
    """The path of this user's key, which the user's nodes on this machine share."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and Path(runtime).stat().st_uid == os.geteuid():
        return Path(runtime) / "kvconnect" / "key"
    config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".config")
    return Path(config) / "kvconnect" / "key"


def user_key(environ: Mapping[str, str]) -> tuple[str, Path]:
    """The key of this user, created if missing, and its path. Raises ``ConfigError``.

    Two processes that create the key at the same time get the same key.
    """
    path = user_key_path(environ)
    field = "the key of this user"
    if not path.exists():
        write(path, new_secret())
    return checked_secret(read_secret(path, field), field), path
