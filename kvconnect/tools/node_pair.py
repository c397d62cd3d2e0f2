"""This node and a running peer: whether they connect and agree, whether their caches fit, and how fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvconnect import __version__
from kvconnect.addresses import join_address
from kvconnect.errors import KVConnectError
from kvconnect.peer.asking import Answered
from kvconnect.peer.description import Description
from kvconnect.peer.handles import MOST_SKEW_S
from kvconnect.peer.messages import PROTOCOL_VERSION
from kvconnect.tools.cache_pairs import check_nodes
from kvconnect.tools.facts import Facts
from kvconnect.tools.findings import Finding, failure, failure_if, warning, well
from kvconnect.tools.link_check import check_link
from kvconnect.tools.server_client import side_channels

_NOTICED_SKEW_S = 5.0
_UNREACHED = {
    "nothing listens": "start it; its log has the side channel's address (not that of HTTP)",
    "key": "compare `kvconnect keys show` on both: they need the same key_file, or to know each other's keys",
    "allow_peers": "add it to allow_peers",
    "answers no such question": "install the same release of kvconnect on both",
}
_BLOCKED = "look at host, port and the firewall between the two; rank r listens on port + r"

Ranks = Mapping[int, Answered[Description]]


def check_peer(facts: Facts, given: str, tokens: int, *, measured: bool) -> Iterator[Finding]:
    """Whether KV of a request would be transferred between this node and a peer, and over which lane.

    ``given``: as of ``side_channels``. With ``measured`` also how fast.
    """
    try:
        address = side_channels(given, "--peer")[0]
        peer = {0: facts.describe(address)}
        first = peer[0].value
        has_one_protocol = first.protocol == PROTOCOL_VERSION
        if has_one_protocol:
            peer |= {one.rank: facts.describe((one.host, one.port)) for one in first.directory if one.rank}
        yield from _check_pair(facts, join_address(*address), peer, _own_ranks(facts), tokens)
    except KVConnectError as error:
        advice = next((advice for part, advice in _UNREACHED.items() if part in str(error)), _BLOCKED)
        about = "release" if "answers no such question" in str(error) else "peer"
        yield failure(about, f"{given}: {error}", advice)
        return
    if measured and has_one_protocol:
        try:
            yield from check_link(facts, first, address)
        except KVConnectError as error:
            advice = "look at the rows of engine, transport and caches"
            yield failure("rate", f"nothing came over: {error}", advice)


def _own_ranks(facts: Facts) -> Ranks:
    """The ranks of this node; none if it does not run. Raises ``PeerError`` if one does not answer."""
    if facts.own is None:
        return {}
    extra, ours = facts.extra, facts.own.value
    at = {one.rank: (one.host, one.port) for one in ours.directory}
    ranks = range(ours.introduction.meaning.topology.size)
    return {rank: facts.describe(at.get(rank, (extra.host, extra.port + rank))) for rank in ranks}


def _check_pair(facts: Facts, address: str, peer: Ranks, own: Ranks, tokens: int) -> Iterator[Finding]:
    theirs = peer[0].value
    packages = ", ".join(f"{name} {version}" for name, version in theirs.versions.items() if name != "python")
    yield well("peer", f"{address}: {theirs.role}, {len(peer)} ranks, {packages}")
    yield _clock(peer[0])
    there = f"{theirs.release} (protocol {theirs.protocol})"
    both = f"the peer has {there}, here is {__version__} ({PROTOCOL_VERSION})"
    if theirs.protocol != PROTOCOL_VERSION:
        yield failure("release", both, "install releases of one protocol on both, see CHANGELOG.md")
        return
    yield well("release", both)
    role = facts.config.kv_role if facts.config is not None else "kv_both"
    alike = role == theirs.role != "kv_both"
    found = f"both are {role}: nothing would come over" if alike else f"{role} here, {theirs.role} there"
    yield failure_if(alike, "roles", found, "kv_producer on one, kv_consumer on the other")
    if own:
        yield well("lane", f"the peer's engine: {theirs.lane}; here: {own[0].value.lane}")
        # This node is D, unless it only sends.
        is_source = facts.config is not None and not facts.config.is_consumer
        sides = (own, peer) if is_source else (peer, own)
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
