"""This node and a running peer: whether they connect and agree, and whether their caches fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from kvconnect import __version__
from kvconnect.errors import KVConnectError
from kvconnect.peer.asking import Answered
from kvconnect.peer.description import Description
from kvconnect.peer.handles import MOST_SKEW_S
from kvconnect.peer.messages import PROTOCOL_VERSION
from kvconnect.tools.cache_pairs import check_nodes
from kvconnect.tools.facts import Facts, Probes
from kvconnect.tools.findings import Finding, failure, failure_if, warning, well

_NOTICED_SKEW_S = 5.0
_UNREACHED = {
    "nothing listens": "start it; its log has the side channel's address (not that of HTTP)",
    "key": "compare `kvconnect keys show` on both: they need the same key_file, or to know each other's keys",
    "allow_peers": "add it to allow_peers",
    "answers no such question": "install the same release of kvconnect on both",
}
_BLOCKED = "look at host, port and the firewall between the two; rank r listens on port + r"

Ranks = Mapping[int, Answered[Description]]


@dataclass(frozen=True)
class NodePair:
    """The ranks of the peer, and the ranks of this node if it runs."""

    address: str
    peer: Ranks
    own: Ranks

    @property
    def has_one_protocol(self) -> bool:
        """Whether the peer has our protocol version."""
        return self.peer[0].value.protocol == PROTOCOL_VERSION


def meet(address: tuple[str, int], facts: Facts, probes: Probes) -> NodePair:
    """Ask all ranks of a peer and of this node. Raises ``PeerError`` if one does not answer."""
    extra, own = facts.extra, {}
    ask = partial(probes.describe, extra, facts.keyring)
    peer = {0: ask(address)}
    first = peer[0].value
    if first.protocol == PROTOCOL_VERSION:
        peer |= {one.rank: ask((one.host, one.port)) for one in first.directory if one.rank}
    if facts.own is not None:
        ours = facts.own.value
        at = {one.rank: (one.host, one.port) for one in ours.directory}
        ranks = range(ours.introduction.meaning.topology.size)
        own = {rank: ask(at.get(rank, (extra.host, extra.port + rank))) for rank in ranks}
    return NodePair(f"{address[0]}:{address[1]}", peer, own)


def unreached(address: str, error: KVConnectError) -> Finding:
    """The finding for a peer that does not answer, or not as a peer, with a likely cause."""
    advice = next((advice for part, advice in _UNREACHED.items() if part in str(error)), _BLOCKED)
    about = "release" if "answers no such question" in str(error) else "peer"
    return failure(about, f"{address}: {error}", advice)


def check_pair(facts: Facts, pair: NodePair, tokens: int) -> Iterator[Finding]:
    """Whether KV of a request would be transferred between the two, and over which lane."""
    theirs = pair.peer[0].value
    packages = ", ".join(f"{name} {version}" for name, version in theirs.versions.items() if name != "python")
    yield well("peer", f"{pair.address}: {theirs.role}, {len(pair.peer)} ranks, {packages}")
    yield _clock(pair.peer[0])
    there = f"{theirs.release} (protocol {theirs.protocol})"
    both = f"the peer has {there}, here is {__version__} ({PROTOCOL_VERSION})"
    if not pair.has_one_protocol:
        yield failure("release", both, "install releases of one protocol on both, see CHANGELOG.md")
        return
    yield well("release", both)
    role = facts.config.kv_role if facts.config is not None else "kv_both"
    alike = role == theirs.role != "kv_both"
    found = f"both are {role}: nothing would come over" if alike else f"{role} here, {theirs.role} there"
    yield failure_if(alike, "roles", found, "kv_producer on one, kv_consumer on the other")
    if pair.own:
        yield well("lane", f"the peer's engine: {theirs.lane}; here: {pair.own[0].value.lane}")
        # This node is D, unless it only sends.
        is_source = facts.config is not None and not facts.config.is_consumer
        sides = (pair.own, pair.peer) if is_source else (pair.peer, pair.own)
        ranks = [{rank: one.value.introduction for rank, one in side.items()} for side in sides]
        yield from check_nodes(ranks[0], ranks[1], tokens, convert=facts.extra.convert_dtype)
        return
    identity = theirs.introduction.meaning.identity
    yield from (well(f"peer's {name}", identity.text(name)) for name in identity.entries)
    engine = theirs.introduction.engine
    if facts.engine not in ("", engine):
        yield failure("engine", f"the peer's is {engine}, here it is {facts.engine}", "set the same on both")
    yield warning(
        "caches",
        "not compared, as this node does not run, or has no fixed port",
        "start it with `port` set, and ask again; `kvconnect doctor P.json D.json` compares files",
    )


def _clock(peer: Answered[Description]) -> Finding:
    ahead_s = peer.value.clock_s - (peer.asked_at + peer.answered_at) / 2
    unsure_s = (peer.answered_at - peer.asked_at) / 2
    found = f"the peer's is {abs(ahead_s):.3g} s {'ahead' if ahead_s > 0 else 'behind'} (+- {unsure_s:.2g} s)"
    advice = "run NTP (chronyd) on both"
    if abs(ahead_s) - unsure_s > MOST_SKEW_S:
        return failure("clock", f"{found}: handles count as expired, or live too long", advice)
    if abs(ahead_s) - unsure_s > _NOTICED_SKEW_S:
        return warning("clock", f"{found}: from {MOST_SKEW_S:g} s on nothing is loaded", advice)
    return well("clock", found)
