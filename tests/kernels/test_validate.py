"""`validate=True` looks at what tables, lengths and slots hold, eagerly and under `checkify`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from paged_problem import make_problem

from pallas_kernels import copy_blocks, paged_attention, paged_decode, write_kv

NAMES = ("q", "k_pool", "v_pool", "block_tables", "seq_lens", "query_start_loc")
PROBLEM = make_problem([5, 20], [1, 4])  # tables [2, 2] of blocks of 16, 9 blocks in the pool


@jax.jit
@checkify.checkify
def checked_attention(arguments: dict[str, Any]) -> jax.Array:
    return paged_attention(**arguments, validate=True, backend="reference")


def _changed(name: str, values: Any) -> dict[str, Any]:
    arguments = dict(zip(NAMES, PROBLEM.arguments(), strict=True))
    return {**arguments, name: jnp.asarray(values, jnp.int32)}


WRONG = [
    ("block_tables", [[1, 0], [2, 9]], "block_tables holds 9; it must hold numbers from 0 to 8: block ids of a pool"),
    ("block_tables", [[1, 0], [2, -1]], "block_tables holds -1; it must hold numbers from 0 to 8"),
    ("block_tables", [[1, 0], [2, 0]], "block_tables names the null block 0 within a sequence's length, in 1 places"),
    ("seq_lens", [5, 33], "seq_lens holds 33; it must hold numbers from 0 to 32: tokens in 2 blocks of 16"),
    ("seq_lens", [-1, 20], "seq_lens holds -1; it must hold numbers from 0 to 32"),
    ("query_start_loc", [0, 1, 6], "query_start_loc holds 6; it must hold numbers from 0 to 5"),
    ("query_start_loc", [1, 1, 5], "query_start_loc begins with another number than 0"),
    ("query_start_loc", [0, 3, 1], "query_start_loc decreases in 1 places"),
    ("seq_lens", [5, 3], "query_start_loc gives 1 sequences more query tokens than seq_lens says they have"),
]


@pytest.mark.parametrize(("name", "values", "message"), WRONG, ids=str)
def test_wrong_contents_are_named(name: str, values: Any, message: str) -> None:
    arguments = _changed(name, values)
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments, validate=True)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        checked_attention(arguments)[0].throw()


def test_right_contents_pass() -> None:
    arguments = _changed("seq_lens", PROBLEM.seq_lens)
    out = paged_attention(**arguments, validate=True)
    assert (out == paged_attention(**arguments)).all()
    decode = {name: arguments[name] for name in NAMES[1:-1]}
    paged_decode(arguments["q"][:2], **decode, validate=True)
    error, _ = checked_attention(arguments)
    error.throw()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([16, 48], "slot_mapping holds 48; it must hold numbers from 0 to 47: slots of 3 blocks of 16"),
        ([-1, 16], "slot_mapping holds -1; it must hold numbers from 0 to 47"),
        ([17, 17], "slot_mapping names 1 slots twice"),
    ],
)
def test_wrong_slots_are_named(slots: list[int], message: str) -> None:
    new, pool = jnp.zeros((2, 3, 64)), jnp.zeros((3, 3, 16, 64))
    with pytest.raises(ValueError, match=message):
        write_kv(new, new, pool, pool, jnp.array(slots, jnp.int32), validate=True)
    write_kv(new, new, pool, pool, jnp.zeros(2, jnp.int32), validate=True)  # padding may share a slot


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([1, 2], [3, 5], "dst holds 5; it must hold numbers from 0 to 4"),
        ([1, 2], [3, 3], "dst names 1 blocks twice"),
        ([1, 3], [3, 4], "1 blocks are both in src and in dst"),
    ],
)
def test_wrong_copies_are_named(src: list[int], dst: list[int], message: str) -> None:
    arguments = (jnp.array(src, jnp.int32), jnp.array(dst, jnp.int32))
    with pytest.raises(ValueError, match=message):
        copy_blocks([jnp.zeros((5, 2))], *arguments, validate=True)
