"""Who a node is to its peers, and who they are to it: CURVE key pairs, and the secret of handles."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.key_files import checked_secret, read_secret, user_key

logger = logging.getLogger(__name__)

KEY_VARIABLE = "KVCONNECT_KEY"
KEYS_DIR_VARIABLE = "KVCONNECT_KEYS_DIR"
NODE_KEY = "node.key"
CLUSTER_KEY = "cluster.key"
PEERS = "peers"
PEER_SUFFIX = ".json"
KEY_BYTES = 32
_SETTLED_NS = 1_000_000_000
"""File systems give changes that follow each other quickly the same time."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, 32 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.hex()})"


class PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a peer: its public key in hex, and where it listens if we fetch from it.

    ``addresses`` are written as in ``allow_peers``.
    """

    public_key: str
    addresses: tuple[str, ...] = ()


class SharedKeys:
    """Keys that every node of a small cluster derives from one secret; ``source`` is its place, for people.

    ``server`` is who a node is to those who connect to it, ``client`` to those that it connects to.
    """

    def __init__(self, secret: str, source: str) -> None:
        self.server = key_pair(derive(secret, "curve server"))
        self.client = key_pair(derive(secret, "curve client"))
        self.handle_secret = derive(secret, "handles")
        self._source = source

    def server_key(self, host: str, port: int) -> bytes | None:
        """The public key that a peer must have at an address; None if it is not known."""
        return self.server.public

    def knows(self, public: bytes) -> bool:
        """Whether a client with this public key may connect."""
        return hmac.compare_digest(public, self.client.public)

    def describe(self) -> str:
        """Which keys these are, without their secrets, for an operator who compares two nodes."""
        return f"shared key {fingerprint(self.server.public)} from {self._source}"


class NodeKeys:
    """A node's own key pair, and those of its peers, in a folder.

    The folder has ``node.key`` (secret, in hex), ``cluster.key`` (the secret that handles are signed
    with, the same on all nodes) and ``peers/NAME.json`` (``PeerFile``). A peer without addresses is found
    at the host that it is named after. Peers that are added, replaced or removed while the node runs
    count from the next handshake on. Raises ``ConfigError``: a file is missing, wrong, or readable by others.
    """

    def __init__(self, folder: Path, field: str) -> None:
        self.folder = folder
        where = f"{field}: {NODE_KEY}"
        self.server = self.client = key_pair(key_bytes(read_secret(folder / NODE_KEY, where), where))
        where = f"{field}: {CLUSTER_KEY}"
        secret = checked_secret(read_secret(folder / CLUSTER_KEY, where), where)
        self.handle_secret = derive(secret, "handles")
        self._seen = self._state()
        self._take(read_peers(folder))

    def server_key(self, host: str, port: int) -> bytes | None:
        """That of the first peer, by name, that has this address."""
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
        """What changes with the folder; None while it may change again without that being seen."""
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
            # The peers known before stay; it is looked at again when the folder changes.
            logger.error("the peers' keys were not read again: %s", error)


Keyring = SharedKeys | NodeKeys


def described(keyring: Keyring | None) -> str:
    """A keyring as a line of text."""
    return keyring.describe() if keyring else "insecure: neither authenticated nor encrypted"


def load_keyring(extra: ExtraConfig, environ: Mapping[str, str]) -> Keyring | None:
    """The keys that are configured, or those of this user where only this machine can be meant.

    None where the configuration sets ``insecure``. Raises ``ConfigError``: there are none, or they are wrong.
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
    """The peers of a node, by name and in its order. Raises ``ConfigError``."""
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
    """The pair of a secret key of 32 bytes."""
    return KeyPair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def new_key_pair() -> KeyPair:
    """A new random pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public), z85.decode(secret))


def fingerprint(public: bytes) -> str:
    """A short name of a public key, for people who compare two."""
    return hashlib.sha256(public).hexdigest()[:16]


def derive(secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose from a secret: HKDF (RFC 5869) with SHA-256."""
    extracted = hmac.digest(b"kvconnect 1", secret.encode(), "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")
