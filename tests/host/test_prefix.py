"""Blocks known by their content: who is found, who is evicted, and what equal hashes mean."""

import json

import pytest
from host_harness import make_request

import pagedjax.host.prefix as prefix
from pagedjax.config import CacheConfig
from pagedjax.errors import BlocksInUse, DoubleFree, InvariantError, SnapshotError, UnknownBlock
from pagedjax.host import Admission, BlockPool, PagedAllocator
from pagedjax.request import Sequence


def chain(*tokens, salt=None, seed=0, size=2):
    """The hashes of full blocks of two tokens."""
    hashes = []
    prefix.extend_chain(hashes, prefix.root_hash(seed, salt), tokens, len(tokens) // size, size)
    return hashes


def sealed_pool(num_blocks, hashes):
    """A pool whose first blocks are sealed and used."""
    pool = BlockPool(num_blocks)
    for block, hash_ in zip(pool.allocate(len(hashes)), hashes, strict=True):
        pool.seal(block, hash_)
    return pool


def sequence(seq_id, tokens, salt=None, **fields):
    request = make_request(seq_id, 1, salt=salt, **fields)
    request.prompt_token_ids = tuple(tokens)
    return Sequence(seq_id, request, token_ids=list(tokens))


def caching(num_blocks, size=2, **config):
    return PagedAllocator(CacheConfig(size, num_blocks, 0.0, enable_prefix_caching=True, **config))


def compute(allocator, seq):
    """Admits a sequence, computes all of it, and gives it back; returns what it found."""
    (admission,) = allocator.admit([seq], alone=True)
    seq.num_computed = len(seq.token_ids)
    allocator.seal(seq)
    allocator.free(seq)
    allocator.check_invariants()
    return admission


def test_a_hash_stands_for_the_tokens_and_all_before_them():
    assert chain(1, 2, 3, 4) == chain(1, 2, 3, 4, 5)
    a, b = chain(1, 2, 3, 4), chain(9, 2, 3, 4)
    assert a[0] != b[0] and a[1] != b[1]
    assert chain(1, 2, salt="a") != chain(1, 2) != chain(1, 2, seed=1)
    assert chain(1, 2, salt="") != chain(1, 2)
    assert prefix.unpack_tokens(a[1]) == [3, 4]
    assert a[0] != "something else"


def test_a_chain_may_be_extended_bit_by_bit():
    hashes = chain(1, 2)
    prefix.extend_chain(hashes, prefix.root_hash(0, None), [1, 2, 3, 4, 5, 6], 3, 2)
    assert hashes == chain(1, 2, 3, 4, 5, 6)


def test_equal_digests_of_other_tokens_are_not_equal(monkeypatch):
    monkeypatch.setattr(prefix, "block_digest", lambda parent, tokens: bytes(32))
    a, b = chain(1, 2, 3, 4), chain(9, 2, 3, 4)
    assert hash(a[1]) == hash(b[1])
    assert a[1] != b[1] and a[1] == chain(1, 2, 3, 4)[1]
    pool = sealed_pool(4, a)
    assert pool.lookup(b[1]) is None and pool.match(b) == []
    assert pool.match(chain(1, 2, 3, 4)) == [1, 2]


def test_a_block_with_no_references_keeps_its_content_until_it_is_needed():
    hashes = chain(1, 2, 3, 4, 5, 6)
    pool = sealed_pool(4, hashes)
    for block in (3, 2, 1):  # a table gives its tail back first
        assert pool.decref(block)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 3, 0)
    assert pool.match(hashes) == [1, 2, 3]
    assert pool.allocate() == [4]  # one that holds nothing
    assert pool.allocate() == [3]  # then the tail
    assert (pool.match(hashes), pool.num_evictions) == ([1, 2], 1)
    pool.incref(1)
    assert (pool.ref_count(1), pool.num_cached) == (1, 1)
    assert pool.allocate() == [2]
    pool.check_invariants()
    assert pool.lookup(hashes[0]) == 1


def test_the_least_recently_used_goes_first():
    hashes = [*chain(1, 2), *chain(3, 4), *chain(5, 6)]
    pool = sealed_pool(3, hashes)
    for block in (1, 2, 3):
        pool.decref(block)
    pool.incref(1)
    pool.decref(1)
    assert [pool.allocate()[0] for _ in range(3)] == [2, 3, 1]


def test_the_second_block_of_a_content_stays_unknown():
    pool = sealed_pool(3, chain(1, 2))
    (twin,) = pool.allocate()
    known = pool.lookup(chain(1, 2)[0])
    assert pool.seal(twin, chain(1, 2)[0]) is pool.hash_of(known or 0)
    assert pool.hash_of(twin) is None
    pool.decref(twin)
    assert pool.num_cached == 0


def test_what_cannot_be_sealed():
    pool = sealed_pool(3, chain(1, 2))
    with pytest.raises(ValueError, match=r"^block 1 is sealed with BlockHash\(.*\), not BlockHash\(.*\)$"):
        pool.seal(1, chain(3, 4)[0])
    for block, error in ((2, UnknownBlock), (9, UnknownBlock)):
        with pytest.raises(error):
            pool.seal(block, chain(3, 4)[0])
    (block,) = pool.allocate()
    pool.decref(block)
    with pytest.raises(DoubleFree):
        pool.seal(block, chain(3, 4)[0])
    with pytest.raises(DoubleFree):
        pool.incref(block)


def test_forgetting():
    hashes = chain(1, 2, 3, 4)
    pool = sealed_pool(2, hashes)
    pool.decref(2)
    with pytest.raises(BlocksInUse, match=r"^the prefix cache cannot be reset while 1 blocks are in use$"):
        pool.reset_cache()
    pool.unseal(2)
    assert (pool.match(hashes), pool.num_cached, pool.num_free) == ([1], 0, 1)
    pool.unseal(1)
    pool.unseal(1)
    assert pool.match(hashes) == []
    pool.check_invariants()
    pool.seal(1, hashes[0])
    pool.decref(1)
    pool.reset_cache()
    assert (pool.match(hashes), pool.num_cached, pool.num_free) == ([], 0, 2)
    pool.check_invariants()


def test_a_pool_with_a_cache_goes_on_identically_from_a_snapshot():
    hashes = chain(1, 2, 3, 4, 5, 6)
    pool, other = sealed_pool(4, hashes), BlockPool(4)
    for block in (3, 2):
        pool.decref(block)
    other.restore(json.loads(json.dumps(pool.snapshot())))
    assert other.snapshot() == pool.snapshot()
    assert other.match(chain(1, 2, 3, 4, 5, 6)) == [1, 2, 3]
    assert other.allocate(3) == pool.allocate(3) == [4, 3, 2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cached", [1]),
        ("cached", []),
        ("sealed", []),
        ("sealed", [[1, 0], [2, 5]]),
        ("sealed", [[1, 0], [2, 0]]),
        ("hashes", [[3, "00", "00"]]),
        ("hashes", [[-1, "zz", "00"]]),
    ],
)
def test_a_damaged_cache_is_refused(key, value):
    pool = sealed_pool(3, chain(1, 2, 3, 4))
    pool.decref(2)
    data = pool.snapshot()
    with pytest.raises(SnapshotError):
        BlockPool(3).restore({**data, key: value})


def test_invariants_of_the_cache():
    for break_it, message in (
        (lambda pool: pool._hashes.clear(), "or a cached one is not"),
        (lambda pool: pool._by_hash.clear(), "the index of hashes"),
        (lambda pool: pool._cached.clear(), "cached: False"),
    ):
        pool = sealed_pool(3, chain(1, 2, 3, 4))
        pool.decref(2)
        pool.check_invariants()
        break_it(pool)
        with pytest.raises(InvariantError, match=message):
            pool.check_invariants()


def test_a_prompt_finds_its_full_blocks_and_computes_at_least_one_token():
    allocator = caching(16)
    assert compute(allocator, sequence(0, [1, 2, 3, 4, 5])) == Admission()
    assert compute(allocator, sequence(1, [1, 2, 3, 4, 9])) == Admission(4, 4)
    assert compute(allocator, sequence(2, [1, 2, 3, 4])) == Admission(3, 4)
    assert compute(allocator, sequence(3, [1, 2])) == Admission(1, 2)
    assert compute(allocator, sequence(4, [1])) == Admission()
    assert compute(allocator, sequence(5, [2, 2, 3, 4])) == Admission()
    stats = allocator.prefix_stats
    assert (stats.queries, stats.query_tokens, stats.hits, stats.hit_tokens) == (6, 5 + 5 + 4 + 2 + 1 + 4, 3, 4 + 3 + 1)


def test_salts_and_prompt_logprobs_keep_to_themselves():
    allocator = caching(16)
    assert compute(allocator, sequence(0, [1, 2, 3], prompt_logprobs=0)) == Admission()
    assert compute(allocator, sequence(1, [1, 2, 3], prompt_logprobs=0)) == Admission()
    assert compute(allocator, sequence(2, [1, 2, 3])) == Admission(2, 2)
    for salt in ("a", "b"):
        assert compute(allocator, sequence(3, [1, 2, 3], salt)) == Admission()
        assert compute(allocator, sequence(4, [1, 2, 3], salt)) == Admission(2, 2)


def test_hits_are_not_evicted_for_the_rest_of_the_same_prompt():
    allocator = caching(4)
    compute(allocator, sequence(0, [1, 2, 3, 4, 5, 6, 7, 8]))  # all four blocks are cached
    seq = sequence(1, [1, 2, 9, 9, 9, 9, 9])
    (admission,) = allocator.admit([seq], alone=True)
    assert admission == Admission(2, 2)
    assert allocator.block_table(1)[0] == 1 and len(set(allocator.block_table(1))) == 4
    allocator.check_invariants()


def test_samples_of_one_request_follow_a_leader_and_others_take_what_they_have_in_common():
    allocator = PagedAllocator(CacheConfig(2, 16, 0.0))
    group = [sequence(0, [1, 2, 3]), sequence(1, [1, 2, 3]), sequence(2, [1, 2, 4, 5]), sequence(3, [1, 2, 4, 5, 6])]
    assert allocator.admit(group, alone=True) == [
        Admission(),
        Admission(leader_id=0),
        Admission(num_shared=2),
        Admission(num_shared=4),
    ]
    assert [allocator.block_table(i) for i in range(4)] == [[1, 2], [1, 2], [1, 3], [1, 3, 4]]
    assert (allocator.num_logical_blocks, allocator.num_physical_blocks) == (9, 4)
    allocator.check_invariants()
    for seq in group:
        allocator.free(seq)
    assert allocator.pool.num_used == 0


def test_pins_outlast_their_sequence_and_the_cache_switched_off():
    allocator = PagedAllocator(CacheConfig(2, 8, 0.0))
    seq = sequence(0, [1, 2, 3, 4, 5])
    allocator.admit([seq], alone=True)
    seq.num_computed = 5
    allocator.pin("system", seq)
    allocator.free(seq)
    assert allocator.pins() == {"system": [1, 2]}
    assert (allocator.pool.num_used, allocator.num_physical_blocks) == (2, 0)
    other = sequence(1, [1, 2, 3, 4, 6])
    assert allocator.admit([other], alone=True) == [Admission(4, 4)]
    restored = PagedAllocator(CacheConfig(2, 8, 0.0))
    restored.restore(json.loads(json.dumps(allocator.snapshot())))
    assert restored.snapshot() == allocator.snapshot()
    allocator.unpin("system")
    allocator.check_invariants()
    assert allocator.admit([sequence(2, [1, 2, 3, 4, 6])], alone=True) == [Admission()]
    allocator.free(other)
    assert allocator.pool.num_cached == 0
