"""Folders of node keys, as `kvconnect keys` makes them, without it."""

from __future__ import annotations

import json
from pathlib import Path

from kvconnect.peer.keyring import NodeKeys, new_key_pair, write

CLUSTER = "what all nodes sign their handles with"


def make_folder(folder: Path, cluster: str = CLUSTER) -> str:
    """A folder with a key of its own; returns the public one."""
    pair = new_key_pair()
    write(folder / "node.key", pair.secret.hex(), replace=True)
    write(folder / "cluster.key", cluster, replace=True)
    (folder / "peers").mkdir()
    return pair.public.hex()


def introduce(folder: Path, name: str, public: str, *addresses: str) -> None:
    """Tell a folder of a peer."""
    write(
        folder / "peers" / f"{name}.json",
        json.dumps({"public_key": public, "addresses": addresses}),
        replace=True,
    )


def node_keys(folder: Path, *names: str) -> list[NodeKeys]:
    """Nodes of this machine that know each other; made once per folder."""
    if not (folder / names[0]).exists():
        publics = {name: make_folder(folder / name) for name in names}
        for name in names:
            for other in names:
                if other != name:
                    introduce(folder / name, other, publics[other], "127.0.0.0/8")
    return [NodeKeys(folder / name, "keys_dir") for name in names]
