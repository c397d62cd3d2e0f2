"""This node and a peer that serves: whether they meet and agree, and by which path KV would go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvconnect import __version__
from kvconnect.cache.shard import partner_ranks
from kvconnect.doctor.facts import Facts, Probes, TimedDescription, describe
from kvconnect.doctor.findings import Finding, failure, warning, well
from kvconnect.errors import LayoutError, PeerError
from kvconnect.explain.report import reasons_of
from kvconnect.peer.messages import PROTOCOL_VERSION, disagreement, other_weights
from kvconnect.plan.align import align_tables, card_refusal
from kvconnect.plan.wire import align_wire
from kvconnect.scheduler.handles import MOST_SKEW_S

_NOTICED_SKEW_S = 5.0
_UNREACHED = {
    "nothing listens": "start it; its log has the side channel's address (not that of HTTP)",
    "key": "compare `kvconnect keys show` on both: they need the same key_file, or to know each other's keys",
    "allow_peers": "add it to allow_peers",
    "answers no such question": "install the same release of kvconnect on both",
}
_BLOCKED = "look at host, port and the firewall between the two; rank r listens on port + r"

Ranks = Mapping[int, TimedDescription]


@dataclass(frozen=True)
class Pair:
    """The ranks of the peer, and those of this node if it runs; ``problem``: why the peer cannot be asked."""

    address: str
    peer: Ranks
    own: Ranks
    problem: str = ""

    @property
    def speaks_with_us(self) -> bool:
        """It was reached, and has our protocol."""
        return not self.problem and self.peer[0].description.protocol == PROTOCOL_VERSION


def meet(address: tuple[str, int], facts: Facts, probes: Probes) -> Pair:
    """Ask all ranks of a peer, and of this node."""
    extra, keyring, shown = facts.extra, facts.keyring, f"{address[0]}:{address[1]}"
    try:
        first = describe(probes, extra, keyring, address)
        peer = {0: first} | {
            one.rank: describe(probes, extra, keyring, (one.host, one.port))
            for one in first.description.directory
            if one.rank and first.description.protocol == PROTOCOL_VERSION
        }
        own = {} if facts.own is None else {0: facts.own}
        for rank in range(1, facts.own.description.introduction.meaning.world_size if facts.own else 0):
            own[rank] = describe(probes, extra, keyring, (extra.host, extra.port + rank))
    except PeerError as error:
        return Pair(shown, {}, {}, str(error))
    return Pair(shown, peer, own)


def check_pair(facts: Facts, pair: Pair) -> Iterator[Finding]:
    """Whether KV would come over, and how."""
    if pair.problem:
        advice = next((advice for part, advice in _UNREACHED.items() if part in pair.problem), _BLOCKED)
        about = "release" if "answers no such question" in pair.problem else "peer"
        yield failure(about, f"{pair.address}: {pair.problem}", advice)
        return
    peer = pair.peer[0]
    description = peer.description
    packages = ", ".join(
        f"{name} {version}" for name, version in description.versions.items() if name != "python"
    )
    yield well("peer", f"{pair.address}: {description.role}, {len(pair.peer)} ranks, {packages}")
    yield from _clock(peer)
    both = (
        f"the peer has {description.release} (protocol {description.protocol}), "
        f"here is {__version__} ({PROTOCOL_VERSION})"
    )
    if description.protocol != PROTOCOL_VERSION:
        yield failure(
            "release", both, "install releases of one protocol on both; CHANGELOG.md has which those are"
        )
        return
    yield well("release", both)
    yield from _roles(facts, description.role)
    theirs = description.introduction
    yield well("peer's weights", theirs.meaning.weights or "not named")
    if not pair.own:
        if facts.engine not in ("", theirs.engine):
            yield failure(
                "engine", f"the peer's is {theirs.engine}, here it is {facts.engine}", "set the same on both"
            )
        yield warning(
            "caches",
            "not compared, as this node does not run, or has no fixed port",
            "start it with `port` set, and ask again; `kvconnect explain` compares files",
        )
        return
    yield from _agreement(facts, pair)


def _clock(peer: TimedDescription) -> Iterator[Finding]:
    ahead_s = peer.description.clock_s - (peer.asked_at + peer.answered_at) / 2
    unsure_s = (peer.answered_at - peer.asked_at) / 2
    found = f"the peer's is {abs(ahead_s):.3g} s {'ahead' if ahead_s > 0 else 'behind'} (+- {unsure_s:.2g} s)"
    if abs(ahead_s) - unsure_s > MOST_SKEW_S:
        yield failure(
            "clock", f"{found}: handles count as expired, or live too long", "run NTP (chronyd) on both"
        )
    elif abs(ahead_s) - unsure_s > _NOTICED_SKEW_S:
        yield warning(
            "clock", f"{found}: from {MOST_SKEW_S:g} s on nothing is loaded", "run NTP (chronyd) on both"
        )
    else:
        yield well("clock", found)


def _roles(facts: Facts, role: str) -> Iterator[Finding]:
    ours = facts.config.kv_role if facts.config is not None else "kv_both"
    if ours == role != "kv_both":
        yield failure(
            "roles",
            f"both are {role}: nothing would come over",
            "kv_producer on one, kv_consumer on the other",
        )
    else:
        yield well("roles", f"{ours} here, {role} there")


def _agreement(facts: Facts, pair: Pair) -> Iterator[Finding]:
    """What a greeting would be refused for, and where it would not, the paths between all ranks."""
    # KV goes to this node, unless it only sends.
    is_source = facts.config is not None and not facts.config.is_consumer
    sources, targets = (pair.own, pair.peer) if is_source else (pair.peer, pair.own)
    ours, theirs = pair.own[0].description, pair.peer[0].description
    our_meaning, their_meaning = ours.introduction.meaning, theirs.introduction.meaning
    refusal, weights = (
        disagreement(ours.introduction, theirs.introduction),
        other_weights(our_meaning, their_meaning),
    )
    if weights:
        yield failure(
            "weights",
            f"here {our_meaning.weights!r}, peer {their_meaning.weights!r}",
            "load the same checkpoint and revision on both",
        )
    else:
        yield well("weights", "the same on both")
    if refusal and refusal != weights:
        yield failure(
            "model",
            f"the peer asks, here it is asked: {refusal}",
            "serve the same model, cache dtype and engine on both",
        )
        return
    yield well("lane", f"the peer's engine: {theirs.lane}; here: {ours.lane}")
    meaning = targets[0].description.introduction.meaning
    sizes = len(targets), sources[0].description.introduction.meaning.world_size, meaning.num_heads
    open_paths: dict[str, list[str]] = {}
    closed: dict[str, list[str]] = {}
    for rank in targets:
        for partner in partner_ranks(rank, *sizes):
            if partner not in sources:
                yield failure(
                    "ranks",
                    f"rank {partner} of the prefill node is not known",
                    "ask again once it has served a request",
                )
                continue
            name = f"{partner} > {rank}"
            found = paths(sources[partner], targets[rank], facts.extra.convert_dtype)
            usable = [path for path, reasons in found.items() if not reasons]
            why = "; ".join(f"{path}: {', '.join(reasons)}" for path, reasons in found.items() if reasons)
            (open_paths if usable else closed).setdefault(
                " and ".join(usable) + (f" (closed: {why})" if why else ""), []
            ).append(name)
    for shown, ranks in closed.items():
        yield failure(
            "caches",
            f"no path from rank to rank {', '.join(ranks)}{shown}",
            "mend what differs, or path: packed on both",
        )
    for shown, ranks in open_paths.items():
        yield well("caches", f"rank to rank {', '.join(ranks)}: {shown}")


def paths(source: TimedDescription, target: TimedDescription, convert: bool) -> dict[str, list[str]]:
    """By path, the reasons for which it is closed from a rank to another."""
    closed: dict[str, list[str]] = {"direct": [], "packed": []}
    for side, description in (("source", source.description), ("target", target.description)):
        if description.path != "auto":
            closed["packed" if description.path == "direct" else "direct"].append(
                f"the {side}'s path is {description.path!r}"
            )
        if description.path != "direct" and not description.introduction.slot_bytes:
            closed["packed"].append(f"the {side} has no slots")
    cards = source.description.introduction.table, target.description.introduction.table
    if refusals := [refusal for card in cards if (refusal := card_refusal(card))]:
        return {path: reasons + refusals for path, reasons in closed.items()}
    try:
        align_wire(*cards, convert=convert)
    except LayoutError as error:
        closed["packed"].extend(reasons_of(error))
    try:
        align_tables(*cards)
    except LayoutError as error:
        closed["direct"].extend(reasons_of(error))
    return closed
