"""The books of a tier's memory: whether they balance."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from cascade.engine.vllm.blocks import SCRATCH, Blocks, PagedCache
from cascade.tier.block_manager import BlockManager
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.slot import Slot


def check_blocks(pool: BlockManager) -> None:
    """Raise `AssertionError`, with the arithmetic, if the books do not balance."""
    kept = sum(allocation.blocks for allocation in pool._kept)
    held = sum(allocation.blocks for allocation in pool._allocations if allocation.in_use)
    counted = pool.free + kept + held + pool.lent
    sum_ = f"{pool.free} free + {kept} kept + {held} held + {pool.lent} lent blocks are {counted} of {pool.total}"
    assert min(pool.free, pool.lent) >= 0, sum_
    assert counted == pool.total, sum_
    assert set(pool._kept) == {allocation for allocation in pool._allocations if not allocation.in_use}, (
        "kept allocations are those not in use"
    )
    assert len(pool._index) <= pool.total, f"the index has {len(pool._index)} entries for {pool.total} blocks"
    for allocation in pool._kept:
        twins = [other for other in pool._index[allocation.keys[-1]] if not other.in_use]
        assert twins == [allocation], "a text is kept twice, or its beginning beside it"
    for key, allocations in pool._index.items():
        assert allocations, f"the index has an empty entry {key}"
        for allocation in allocations:
            assert allocation in pool._allocations, f"the index leads from {key} to an allocation that is gone"
            assert key in allocation.keys, f"the index leads from {key} to an allocation that has it no more"
            assert len(allocation.tokens) <= allocation.capacity, (
                f"{len(allocation.tokens)} positions in {allocation.blocks} blocks"
            )


def check_memory(admission: KVAdmission, slots: Collection[Slot[Any]] = ()) -> None:
    """Raise `AssertionError`, with the arithmetic, if the books do not balance."""
    check_blocks(admission.block_manager)
    held = [slot.allocation for slot in slots if slot.allocation is not None]
    assert len(held) == len(set(held)), "two sessions hold one allocation"
    assert all(allocation.in_use for allocation in held), "a session holds an allocation that is kept for reuse"
    lent, forked = admission.block_manager.lent, sum(fork.blocks for slot in slots for fork in slot.forks.values())
    assert lent == forked, f"{lent} blocks are lent, and forks have {forked}"
    for slot in slots:
        capacity = slot.allocation.capacity if slot.allocation else 0
        assert slot.session.kv_len <= capacity, f"{slot.session.kv_len} positions are said to be in room for {capacity}"


def check_pages(blocks: Blocks, caches: Collection[PagedCache]) -> None:
    """Raise `AssertionError`, with the arithmetic, unless ``caches`` are all that hold blocks of vLLM's."""
    users = Counter(block for cache in caches for block in cache.table)
    sum_ = f"{blocks.num_free} free + {len(users)} held blocks are {blocks.num_free + len(users)} of {blocks.total - 1}"
    assert blocks.num_free + len(users) == blocks.total - 1, sum_
    assert SCRATCH not in users, "a session holds the scratch block"
    assert all(blocks.shared(block) == (number > 1) for block, number in users.items()), "a block is shared by another number"
