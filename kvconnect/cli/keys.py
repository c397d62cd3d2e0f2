"""``kvconnect keys``: makes and shows the keys of the side channel."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvconnect.cli.options import Key, keys_at
from kvconnect.errors import ConfigError, PeerError
from kvconnect.peer import keyring
from kvconnect.peer.allow_list import AllowList
from kvconnect.receipt import RECEIPT_KEY
from kvconnect.receipt import verify as verified
from kvconnect.tools.showing import printable

keys_app = typer.Typer(
    name="keys",
    help="Make and exchange the keys that nodes know each other by; `kvconnect doctor` checks them.\n\n"
    "A small cluster shares one key: `keys new FILE`, copy FILE to every node, and set key_file (or put what "
    "is in it into KVCONNECT_KEY). Where each node is to have its own: `keys node DIR` on every node, with "
    "the first one's cluster.key copied to the others; `keys add` on each for every peer; and set keys_dir "
    "(or KVCONNECT_KEYS_DIR).",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The node's folder of keys.")]
Addresses = Annotated[
    list[str] | None,
    typer.Option(
        help="Where the peer listens, if this node fetches from it: host, host:port, network or "
        "network:port-port (repeatable); left out, the host that NAME is."
    ),
]


@keys_app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; - for the terminal.")],
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite a key that is there.")] = False,
) -> None:
    """Make a key that all nodes of a small cluster share."""
    secret = keyring.new_secret()
    if str(file) == "-":
        typer.echo(secret)
        return
    _write_key(file, secret, replace)
    typer.echo(f"{file}: {keyring.SharedKeys(secret, str(file)).describe()}")
    typer.echo("Copy it to every node, readable by its service alone (mode 0600), and set key_file to it.")


@keys_app.command()
def node(
    folder: Folder,
    cluster_key: Annotated[
        Path | None,
        typer.Option(help="cluster.key of another node, to copy; left out, one is made where there is none."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Give the node another key; its peers must get the public one.")
    ] = False,
) -> None:
    """Make a node's own key pair, in a folder for it and for its peers' public keys."""
    secret = keyring.read_secret(cluster_key, "--cluster-key") if cluster_key else keyring.new_secret()
    secret = keyring.checked_secret(secret, "--cluster-key")
    _write_key(folder / keyring.NODE_KEY, keyring.new_key_pair().secret.hex(), replace)
    keyring.write(folder / keyring.CLUSTER_KEY, secret, replace=cluster_key is not None)
    (folder / keyring.PEERS).mkdir(mode=0o700, exist_ok=True)
    _show_node(folder)


@keys_app.command()
def add(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the peer.")],
    public_key: Annotated[str, typer.Argument(metavar="PUBLIC_KEY", help="As `keys show` prints it there.")],
    at: Addresses = None,
) -> None:
    """Let a peer connect to this node, and this node to it; a running node need not be restarted."""
    public = keyring.key_bytes(public_key, "PUBLIC_KEY")
    AllowList(at or (name,), "--at" if at else "NAME, without --at,")
    text = msgspec.json.encode(keyring.PeerFile(public.hex(), tuple(at or ()))).decode()
    keyring.write(_peer_path(folder, name), text, mode=0o644, replace=True)
    typer.echo(
        f"{name} ({keyring.fingerprint(public)}) may connect; it is expected at {', '.join(at or [name])}"
    )


@keys_app.command()
def remove(
    folder: Folder, name: Annotated[str, typer.Argument(metavar="NAME", help="What the peer is called.")]
) -> None:
    """Let a peer connect no more; a running node need not be restarted, what is connected stays so."""
    path = _peer_path(folder, name)
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"NAME is {name!r}: {path} cannot be removed: {error}") from error
    typer.echo(f"{name} may not connect any more")


@keys_app.command()
def show(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]", help="A key file or a node's folder; left out, what a node would use."
        ),
    ] = None,
) -> None:
    """Show fingerprints, public keys and peers; never a secret."""
    keys = keyring.load_keyring(keys_at(path), os.environ)
    assert keys is not None, "only `insecure` has none"
    if isinstance(keys, keyring.NodeKeys):
        _show_node(keys.folder)
    else:
        typer.echo(keys.describe())


@keys_app.command()
def verify(
    receipt: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A receipt, or an answer with one; - for standard input."),
    ],
    key: Key = None,
) -> None:
    """Check the signature of a request's receipt, and print what it states; exit 1 if it is wrong.

    A prefill node's receipt within it is covered by its signature.
    """
    try:
        given = json.loads(sys.stdin.read() if str(receipt) == "-" else receipt.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"FILE is {str(receipt)!r}, which has no JSON: {error}") from error
    for name in ("kv_transfer_params", RECEIPT_KEY):
        given = given[name] if isinstance(given, dict) and name in given else given
    keys = keyring.load_keyring(keys_at(key), os.environ)
    assert keys is not None, "only `insecure` has none"
    try:
        found = verified(given, keys.receipt_secret)
    except PeerError as error:
        typer.echo(f"the receipt is not valid: {error}")
        raise typer.Exit(1) from error
    served = ", ".join(f"{count} {origin}" for origin, count in found.tokens.items())
    typer.echo(f"valid: request {printable(found.request_id)}, {found.prompt_tokens} prompt tokens: {served}")


def _write_key(path: Path, text: str, replace: bool) -> None:
    if not keyring.write(path, text, replace=replace):
        raise ConfigError(f"{path} is there already; give another name, or --replace")


def _peer_path(folder: Path, name: str) -> Path:
    if not name or name.startswith(".") or "/" in name:
        raise ConfigError(f"NAME is {name!r}; accepted: a file name")
    if not (folder / keyring.PEERS).is_dir():
        raise ConfigError(
            f"DIR is {str(folder)!r}, which has no folder {keyring.PEERS!r}; `kvconnect keys node` makes it"
        )
    return folder / keyring.PEERS / f"{name}{keyring.PEER_SUFFIX}"


def _show_node(folder: Path) -> None:
    public = keyring.NodeKeys(folder, "DIR").server.public
    typer.echo(f"public key   {public.hex()}")
    typer.echo(f"fingerprint  {keyring.fingerprint(public)}")
    for name, peer in keyring.read_peers(folder).items():
        known = keyring.fingerprint(bytes.fromhex(peer.public_key))
        typer.echo(f"peer         {known}  {name} at {', '.join(peer.addresses or (name,))}")
    typer.echo("On every peer: kvconnect keys add DIR NAME " + public.hex() + " --at HOST")
