"""Which blocks of the device's prefix cache peers may fetch by name: those with contents of ended requests.

The stack keeps the blocks as long as it likes. This module names them to the workers once, and reports those
that the stack gives away since. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.tier import Content
from kvconnect.transfer.orders import NamedBlocks, OrdersDraft, Results
from kvconnect.transfer.stack import Names, PrefixPool, RequestView


class SharedPrefixes:
    """The names of a node's blocks, as the workers know them.

    Args:
        groups: the cache groups, of which none is a state.
        hashes: a request's content hashes, as ``pool`` has them.
        pool: the stack's prefix cache.
    """

    def __init__(
        self, groups: Sequence[HitGroup], hashes: Names, pool: PrefixPool, draft: OrdersDraft
    ) -> None:
        self._groups, self._hashes, self._pool, self._draft = groups, hashes, pool, draft
        self._blocks: dict[Content, int] = {}
        self._contents: dict[int, Content] = {}

    def request_finished(self, request: RequestView) -> None:
        """A request ends: name those blocks of its tokens that the prefix cache has."""
        for group in self._groups:
            number, hashes = group.group, self._hashes(request, group.block_tokens)
            names = group.names(hashes, 0, len(hashes))
            new = [at for at, name in enumerate(names) if (number, name) not in self._blocks]
            if not new:
                continue
            blocks = self._pool.watch(number, [hashes[at] for at in new])
            found = {
                block: names[at]
                for at, block in zip(new, blocks, strict=True)
                if block and block not in self._contents
            }
            for block, name in found.items():
                self._contents[block], self._blocks[number, name] = (number, name), block
            if found:
                self._draft.named.append(NamedBlocks(number, tuple(found), tuple(found.values())))

    def ordered(self) -> None:
        """Before the draft is taken: blocks that the stack gave away lose their names."""
        for block in self._pool.take_reused():
            content = self._contents.pop(block, None)
            if content is not None:
                del self._blocks[content]
                self._draft.reused.append(block)

    def update_results(self, results: Results) -> None:
        """Peers read some blocks: the stack is to reuse them last."""
        if results.read:
            self._pool.refresh(results.read)

    def reset(self) -> None:
        """The weights may have changed: void all names."""
        self._draft.reused.extend(self._contents)
        self._contents.clear()
        self._blocks.clear()
