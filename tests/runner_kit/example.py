"""The runner kit without the rest: ``python -m tests.runner_kit.example``."""

from dataclasses import dataclass

import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.runner_kit.block_table import BlockTables
from kvconnect.runner_kit.kernel_blocks import GraphSupport, init_attention
from kvconnect.runner_kit.zeroing import KVBlockZeroer


@dataclass(frozen=True)
class Backend:
    name: str = "example"
    kernel_block_sizes: tuple[int, ...] = (64,)
    graph_support: GraphSupport = GraphSupport.ALWAYS

    def make_metadata_builder(self, kernel_block_size: int) -> str:
        return f"builder for pages of {kernel_block_size} tokens"


def main() -> None:
    # 100 logical blocks of 128 tokens, two layers of 4 heads x 64; kernels that take pages of 64 tokens.
    spec = AttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    config = KVCacheConfig(100, (KVCacheGroup(("layer0", "layer1"), spec),))

    # Backends first, then one kernel block size, then builders, tables, cache: nothing can disagree.
    setup = init_attention(config, dict.fromkeys(("layer0", "layer1"), Backend()))
    kernel = setup.kernel_block_sizes[0]
    tables = BlockTables(
        max_requests=8,
        max_blocks={0: 32},
        block_sizes={0: 128},
        kernel_block_sizes={0: kernel},
        max_tokens=256,
    )
    shape = (config.num_blocks * 128 // kernel, 4, kernel, 128)
    cache = {name: torch.full(shape, torch.nan, dtype=torch.bfloat16) for name in ("layer0", "layer1")}
    views = {name: CacheTensor(tensor, "block head token content") for name, tensor in cache.items()}
    zeroer = KVBlockZeroer(RegionTable.build(config, setup.kernel_block_sizes, views), device="cpu")

    # A step: request 0 got logical blocks 7 and 3. Tables first, then zeroing, then the forward.
    tables.append_block_ids(0, [[7, 3]])
    tables.apply()
    zeroer.zero_block_ids([7, 3])
    tables.gather([0], num_rows=2)
    tables.compute_slots([0], query_start=[0, 130], positions=torch.arange(130), num_tokens=136)
    print(setup.groups[0].metadata_builder)
    print("pages of request 0:", tables.row(0, 0).tolist())
    print(
        "slot of its token 129:", int(tables.slots(0)[129]), "and of the padding:", int(tables.slots(0)[130])
    )
    print("fresh pages hold NaN:", bool(cache["layer0"][tables.row(0, 0).long()].isnan().any()))


if __name__ == "__main__":
    main()
