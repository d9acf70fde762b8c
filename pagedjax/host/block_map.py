"""Which physical block holds what, as plain data: what pictures of the pool are drawn from (paper Fig. 6 and 8)."""

from __future__ import annotations

from typing import Any

from pagedjax.host.prefix import BlockHash, unpack_tokens
from pagedjax.host.protocol import KVAllocator
from pagedjax.host.scheduler import Scheduler
from pagedjax.request import Sequence


def block_map(scheduler: Scheduler, allocator: KVAllocator) -> list[dict[str, Any]]:
    """Every block that is used or cached, in order of its id.

    Returns:
        Dictionaries with the keys
        block: physical id.
        ref_count: sequences and registered prefixes that refer to it; 0 if it is only cached.
        cached: whether it can be found by its content.
        prefixes: names of the registered prefixes that keep it.
        token_ids: of the tokens whose K and V it holds, as far as they are confirmed.
        num_tokens: those, and the ones still on the device.
        sequences: who refers to it: request_id, index of the sample or beam, seq_id, logical_block.
    """
    holders = _holders(scheduler)
    pins: dict[int, list[str]] = {}
    for name, blocks in allocator.pins().items():
        for block in blocks:
            pins.setdefault(block, []).append(name)
    found = []
    for block in range(1, allocator.num_blocks + 1):
        count, hash_ = allocator.content(block)
        if not count and hash_ is None:
            continue
        users = holders.get(block, [])
        num_tokens, token_ids = _content(users, hash_, allocator.block_size)
        found.append(
            {
                "block": block,
                "ref_count": count,
                "cached": hash_ is not None,
                "prefixes": pins.get(block, []),
                "num_tokens": num_tokens,
                "token_ids": token_ids,
                "sequences": [
                    {
                        "request_id": seq.request.request_id,
                        "index": index,
                        "seq_id": seq.seq_id,
                        "logical_block": logical,
                    }
                    for seq, index, logical, _ in users
                ],
            }
        )
    return found


_Holder = tuple[Sequence, int, int, int]  # the sequence, its index in the group, logical block, tokens computed


def _holders(scheduler: Scheduler) -> dict[int, list[_Holder]]:
    holders: dict[int, list[_Holder]] = {}
    for group in scheduler.roster.groups.values():
        for index, seq in enumerate(group.sequences):
            if seq.slot:
                place = seq.index if group.beam is None else index
                computed = scheduler.roster.num_computed(seq)
                for logical, block in enumerate(scheduler.allocator.block_table(seq.seq_id)):
                    holders.setdefault(block, []).append((seq, place, logical, computed))
    return holders


def _content(users: list[_Holder], hash_: BlockHash | None, size: int) -> tuple[int, list[int]]:
    """Tokens in a block, and their ids."""
    if hash_ is not None:
        return size, unpack_tokens(hash_)
    if not users:
        return 0, []
    seq, _, logical, computed = max(users, key=lambda user: user[3])
    begin = logical * size
    end = max(begin, min(begin + size, computed))
    return end - begin, seq.token_ids[begin:end]
