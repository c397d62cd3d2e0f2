"""Contents of one rank by name, each in a place that may be given to another content at any time.

A place is a row of host memory or a block of the device, and has the name of the content that was put there
last. There are no locks: one thread notes which places are taken for other contents, another which content
was put where, and a reader compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from kvconnect.offload.tier import Content
from kvconnect.pack.page_lanes import Column
from kvconnect.plan.blocks import GroupBlocks

Needed = tuple[HitGroup, tuple[range, ...], list[bytes]]
Held = tuple[int, Column, Column]
"""Places of one class, and for each the number under which its content was put there."""
_Place = tuple[int, int]
_NOWHERE = -1, -1


class NamedContents:
    """Places by the names of their contents. Evicted contents keep names until their places are taken.

    Args:
        device: the region table of the device.
        class_of: by cache group the class of its places; groups of a class share them.
        sizes: by class, how many places there are.

    Raises:
        ConfigError: a group's block size is no multiple of the tokens of a name.
    """

    def __init__(
        self,
        naming: Naming,
        requirements: HitRequirements,
        device: RegionTable,
        class_of: Mapping[int, int],
        sizes: Sequence[int],
    ) -> None:
        for group in requirements.groups:
            if group.block_tokens % naming.tokens:
                raise ConfigError(
                    f"cache group {group.group} has blocks of {group.block_tokens} tokens, and names are of "
                    f"{naming.tokens}: accepted are those that divide it"
                )
        self.naming = naming
        self._requirements, self._class_of = requirements, class_of
        ratios = {geometry.group: geometry.blocks_per_kv_block for geometry in device.groups}
        self._block_bytes = Counter[int]()
        for region in device.regions:
            self._block_bytes[region.group] += region.page_bytes * ratios[region.group]
        # By class and place the number of what took it last, and its last content; by group the place of each
        # name.
        self._taken = [np.zeros(size, dtype=np.int64) for size in sizes]
        self._contents: list[list[Content | None]] = [[None] * size for size in sizes]
        self._places: dict[int, dict[bytes, _Place]] = {group: {} for group in class_of}

    def _put(self, group: int, name: bytes, place: int, number: int) -> None:
        """Name a place by its content, which was put there under a number."""
        contents = self._contents[self._class_of[group]]
        former = contents[place]
        if (
            former not in (None, (group, name))
            and self._places[former[0]].get(former[1], _NOWHERE)[0] == place
        ):
            self._places[former[0]].pop(former[1], None)
        contents[place] = group, name
        self._places[group][name] = place, number

    def _are_there(self, index: int, places: Column, numbers: Column) -> NDArray[np.bool_]:
        """For each place of a class, whether it still holds what was put there under its number."""
        raise NotImplementedError

    def _are_intact(self, held: Sequence[Held]) -> bool:
        return all(bool(self._are_there(*places).all()) for places in held)

    def _hit(self, prefix: Prefix, max_tokens: int, **more: bool) -> int:
        """The longest hit in tokens, 0 for none; ``more`` is passed to ``_known``."""
        needs, start_tokens = self._requirements, prefix.start_tokens
        if prefix.naming != self.naming:
            return 0

        def known(group: HitGroup, first: int, end: int) -> list[bool]:
            names = self._names(prefix, group, range(first, end))
            flags: list[bool] = self._known(group.group, names, **more).tolist()
            return flags

        limit = min(max_tokens + needs.ahead_tokens, len(prefix.names) * self.naming.tokens)
        num_tokens, _ = needs.hit(start_tokens, limit, known)
        return num_tokens if num_tokens > start_tokens else 0

    def _is_named(self, prefix: Prefix, num_tokens: int) -> bool:
        """Whether a hit of ``num_tokens`` lies within a prefix that is named as here."""
        named_tokens = len(prefix.names) * self.naming.tokens
        return prefix.naming == self.naming and prefix.start_tokens < num_tokens <= named_tokens

    def _are_known(self, needed: Sequence[Needed], num_tokens: int, **more: bool) -> bool:
        """Whether all that a hit of ``num_tokens`` needs is named, and known; ``more`` as for ``_hit``."""
        return all(
            not (group.is_state and num_tokens % group.block_tokens)
            and len(names) == sum(map(len, parts))
            and bool(self._known(group.group, names, **more).all())
            for group, parts, names in needed
        )

    def _find(self, group: int, names: Sequence[bytes]) -> tuple[Column, Column]:
        """For each content the place that has or had it, and the number of it; -1 for unknown ones."""
        places = chain.from_iterable(map(self._places[group].get, names, repeat(_NOWHERE)))
        found, numbers = np.fromiter(places, dtype=np.int64, count=2 * len(names)).reshape(-1, 2).T
        return found, numbers

    def _known(self, group: int, names: Sequence[bytes]) -> NDArray[np.bool_]:
        """For each content whether a place has it or is to get it."""
        return self._are_there(self._class_of[group], *self._find(group, names))

    def _needed(self, prefix: Prefix, num_tokens: int) -> list[Needed]:
        """By group the positions that a hit needs, and their names; fewer names if the prefix ends before."""
        found = []
        for group in self._requirements.groups:
            parts = group.needed(num_tokens, prefix.start_tokens) if num_tokens else ()
            found.append(
                (group, parts, [name for part in parts for name in self._names(prefix, group, part)])
            )
        return found

    def _length_bytes(self, needed: Sequence[Needed]) -> int:
        """The bytes of what a hit needs."""
        return sum(self._block_bytes[group.group] * sum(map(len, parts)) for group, parts, _ in needed)

    def _names(self, prefix: Prefix, group: HitGroup, part: range) -> Sequence[bytes]:
        step = group.block_tokens // self.naming.tokens
        return group.names(prefix.names[step - 1 :: step], part.start, part.stop)


def placed(group: HitGroup, parts: Sequence[range], pages: Column) -> GroupBlocks:
    """The blocks ``pages``, of shape ``(n, blocks per position)``, of the positions in ``parts``."""
    if group.is_state or not parts:
        return GroupBlocks(group.group, 0, tuple(pages.ravel().tolist()))
    first, stop = parts[0].start, parts[-1].stop
    ids = np.zeros((stop - first, pages.shape[1]), dtype=np.int64)
    ids[np.concatenate([np.arange(part.start, part.stop) for part in parts]) - first] = pages
    return GroupBlocks(group.group, first * pages.shape[1], tuple(ids.ravel().tolist()))
