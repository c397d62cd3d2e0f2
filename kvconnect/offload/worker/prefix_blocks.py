"""The blocks of one rank's device by name, for peers that fetch what its prefix cache has.

The serving stack gives blocks to other requests without asking, and only in a step. So the thread that
launches steps notes the named blocks that a step may overwrite before any kernel of it is launched: a block
that was read, and then is not noted, was read whole. A stack that does not step overwrites nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.region_table import RegionTable
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.worker.named_contents import NamedContents, placed
from kvconnect.pack.page_lanes import Column
from kvconnect.transfer.kept import Kept, KeptByName, Stock
from kvconnect.transfer.orders import NamedBlocks
from kvconnect.transfer.parts import Finished

_NOTHING: Stock = 0, 0, 0, 0, 0.0


class PrefixBlocks(NamedContents):
    """The named blocks of a device, and behind them the rows of host memory, as ``KeptByName``.

    A block's number is that of the step whose orders named it: it is void once a step of that number or a
    later one takes the block.

    Args:
        num_blocks: logical blocks, the null block included.
        rows: what is offered of host memory; None for nothing.

    Raises:
        ConfigError: a group's block size is no multiple of the tokens of a name.
    """

    def __init__(
        self,
        naming: Naming,
        requirements: HitRequirements,
        device: RegionTable,
        num_blocks: int,
        rows: KeptByName | None = None,
    ) -> None:
        class_of = dict.fromkeys((group.group for group in requirements.groups), 0)
        super().__init__(naming, requirements, device, class_of, [num_blocks])
        self._rows = rows
        # By number, whether the device has computed what was named; those that it had are left out.
        self._computed: dict[int, Finished] = {}
        self._step = self._base = 0

    @property
    def table(self) -> RegionTable | None:
        """See ``KeptByName``."""
        return None if self._rows is None else self._rows.table

    # For the thread that launches steps

    def begin(self, step: int, reused: Collection[int]) -> None:
        """A step is about to be launched, which may overwrite the blocks ``reused``."""
        if step <= self._step:
            # Another scheduler half, which counts its steps anew and knows of no name.
            self.forget()
            self._base = self.number
        self._step = step
        if reused:
            np.put(self._taken[0], list(reused), self.number, mode="clip")

    def forget(self) -> None:
        """Void all names given so far: the pages are about to lose their content or its meaning."""
        self._taken[0][:] = self.number

    @property
    def number(self) -> int:
        """The number of what the orders of the last step name."""
        return self._base + self._step

    # For the thread that serves peers

    def name(self, named: Sequence[NamedBlocks], number: int, is_computed: Finished) -> None:
        """Offer blocks; they hold their contents once ``is_computed``."""
        self._computed = {known: check for known, check in self._computed.items() if not check()}
        if not is_computed():
            self._computed[number] = is_computed
        for blocks in named:
            if blocks.group in self._class_of:
                for block, name in zip(blocks.block_ids, blocks.names, strict=True):
                    self._put(blocks.group, name, block, number)

    def find(self, prefix: Prefix, max_tokens: int) -> Stock:
        """See ``KeptByName``: of a prefix that both have, the device has its part, else host memory."""
        below = _NOTHING if self._rows is None else self._rows.find(prefix, max_tokens)
        here = self._hit(prefix, max_tokens)
        if here < below[0] or not here:
            return below
        return here, self._length_bytes(self._needed(prefix, here)), *below[2:]

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        """See ``KeptByName``."""
        needed = self._needed(prefix, num_tokens) if self._is_named(prefix, num_tokens) else []
        if needed and self._are_known(needed, num_tokens):
            held, groups = [], []
            for group, parts, names in needed:
                blocks, numbers = self._find(group.group, names)
                held.append((0, blocks, numbers))
                groups.append(placed(group, parts, blocks[:, None]))
            named = {int(number) for _, _, numbers in held for number in np.unique(numbers)}
            checks = [check for number, check in self._computed.items() if number in named]
            is_intact = partial(self._are_intact, held)
            if is_intact():
                return Kept(
                    tuple(groups), is_intact, lambda: all(check() for check in checks), on_device=True
                )
        return None if self._rows is None else self._rows.hold(prefix, num_tokens)

    def _are_there(self, index: int, places: Column, numbers: Column) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = self._taken[index][places] < numbers
        return there
