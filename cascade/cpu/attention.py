"""Attention of packed rows over sessions' keys and values, in tiles of the same kind as products.

Keys lie in blocks of sixteen positions, ``[kv_heads, capacity / 16, head_dim, 16]``, values in blocks of sixteen dimensions,
``[kv_heads, blocks, capacity, 16]``, both float32 or both bfloat16: so scores are products of queries with keys, and what comes
out is one of weights with values. What a query gets is added up in the order of positions, and what it does not see adds
nothing: its bits depend on its text alone.

A fork holds its positions in blocks of its own, the first of which may begin with some that are its base's. Its rows look at
both, in the order of positions: nothing is copied. All rows of a pass are stored before any looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import float32, int32
from torch import Tensor

from cascade.cpu.fold import largest, total
from cascade.cpu.jit import (
    BRIEF,
    Step,
    arguments,
    bits,
    floats,
    halves,
    inlined,
    integer,
    kernel,
    num_threads,
    power_of_two,
    real,
    rounded,
    run,
    run_step,
    thread_num,
)
from cascade.cpu.tile import LANES, ROWS, multiply, multiply_onward

# Of a span: first token, tokens, first position; capacity of its storage, position at which that begins and from which on it
# counts, 0 but for forks; capacity of a fork's base; addresses of keys and of values; those of a fork's base.
FIELDS = 11
LEAST = -87.0  # whose exponential is still a number that is held with all its digits
LOWEST = -3.4028235e38
LARGEST = 3.3895314e38  # that bfloat16 holds, too
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4


@inlined
def exponential(x: float) -> Any:
    """Of a number from `LEAST` to 0, in float32 to the last bit or two (Cephes)."""
    exponent = int32(x * float32(_LOG2E) - float32(0.5))  # rounds, for there are no positive ones
    rest = x - float32(exponent) * float32(_LN2_HIGH) - float32(exponent) * float32(_LN2_LOW)
    sum = float32(1.9875691500e-4)
    sum = sum * rest + float32(1.3981999507e-3)
    sum = sum * rest + float32(8.3334519073e-3)
    sum = sum * rest + float32(4.1665795894e-2)
    sum = sum * rest + float32(1.6666665459e-1)
    sum = sum * rest + float32(5.0000001201e-1)
    return (sum * rest * rest + rest + float32(1.0)) * power_of_two(exponent)


@inlined
def _tanh(x: float) -> Any:
    away = abs(x)
    if away > float32(20.0):
        return float32(1.0) if x > 0 else float32(-1.0)
    small = exponential(float32(-2.0) * away)
    value = (float32(1.0) - small) / (float32(1.0) + small)
    return value if x > 0 else -value


@inlined
def _finite(x: float) -> Any:
    """What overflowed in a wrong draft must not reach those that do not see it: they count it 0 times."""
    return x if abs(x) <= float32(LARGEST) else float32(0.0)


@inlined
def _write(given: int, span: int, head: int) -> None:
    """Put a span's new keys and values of one head where they belong."""
    key_size, value_size, capacity = integer(given, 11), integer(given, 12), integer(span, 3)
    blocks = (value_size + LANES - 1) // LANES
    new_keys, new_values = floats(integer(given, 4)), floats(integer(given, 7))
    keys, values = floats(integer(span, 7)), floats(integer(span, 8))
    short_keys, short_values, short = halves(integer(span, 7)), halves(integer(span, 8)), integer(given, 23)
    for token in range(integer(span, 1)):
        position, at = integer(span, 2) + token - integer(span, 4), integer(span, 0) + token
        source = head * integer(given, 5) + at * integer(given, 6)
        to = (head * (capacity // LANES) + position // LANES) * key_size * LANES + position % LANES
        for place in range(key_size):
            number = _finite(new_keys[source + place])
            if short:
                short_keys[to + place * LANES] = rounded(number)
            else:
                keys[to + place * LANES] = number
        source = head * integer(given, 8) + at * integer(given, 9)
        for place in range(value_size):
            to = ((head * blocks + place // LANES) * capacity + position) * LANES + place % LANES
            number = _finite(new_values[source + place])
            if short:
                short_values[to] = rounded(number)
            else:
                values[to] = number


@inlined
def _soften(given: int, scores: int, length: int, first: int, last: int, head: int) -> Any:
    """Make weights of scores at ``scores``: those from ``first`` to ``last`` count; returns what all are to be divided by."""
    held, scale, cap, sinks = floats(scores), real(integer(given, 15)), real(integer(given, 16)), integer(given, 17)
    if cap > 0:
        for place in range(first, last):
            held[place] = _tanh(held[place] * scale / cap) * cap
    else:
        for place in range(first, last):
            held[place] *= scale
    for place in range(first):
        held[place] = float32(LOWEST)
    for place in range(last, length):
        held[place] = float32(LOWEST)
    most = largest(scores, length, floats(sinks)[head] if sinks else float32(LOWEST))
    for place in range(first, last):
        held[place] = exponential(max(held[place] - most, float32(LEAST)))
    for place in range(first):
        held[place] = float32(0.0)
    for place in range(last, length):
        held[place] = float32(0.0)
    sum = total(scores, length, float32(0.0))
    if sinks:
        sum += exponential(max(floats(sinks)[head] - most, float32(LEAST)))
    return sum


@inlined
def _score(given: int, span: int, head: int, rows: int, begin: int, length: int, asked: int, scores: int, spare: int) -> None:
    """Products of ``rows`` queries with the keys of ``length`` positions from ``begin`` on, those of a fork's base first."""
    key_size, capacity, origin, short = integer(given, 11), integer(span, 3), integer(span, 4), integer(given, 23)
    size, shared = key_size * LANES * (2 if short else 4), max(0, integer(span, 5) - begin)
    own = integer(span, 7) + (head * (capacity // LANES) + (begin - origin) // LANES) * size
    common = integer(span, 9) + (head * (integer(span, 6) // LANES) + begin // LANES) * size
    before, apart = -(-shared // LANES), key_size * LANES
    multiply(short, rows, asked, common, scores, length, key_size, key_size, before, apart)
    after, to = length // LANES - before, scores + before * LANES * 4
    multiply(short, rows, asked, own + before * size, to, length, key_size, key_size, after, apart)
    if shared % LANES:  # the block in which the fork begins has positions of both
        block = shared // LANES * LANES
        multiply(short, rows, asked, own + block // LANES * size, spare, LANES, key_size, key_size, 1, apart)
        held, said = floats(scores), floats(spare)
        for one in range(rows):
            for lane in range(shared % LANES, LANES):
                held[one * length + block + lane] = said[one * LANES + lane]


@inlined
def _weigh(given: int, span: int, head: int, rows: int, begin: int, length: int, weights: int, out: int) -> None:
    """Products of weights with the values of ``length`` positions from ``begin`` on, those of a fork's base first."""
    capacity, common_capacity, short = integer(span, 3), integer(span, 6), integer(given, 23)
    blocks, shared = (integer(given, 12) + LANES - 1) // LANES, max(0, integer(span, 5) - begin)
    size, stride, rest = LANES * (2 if short else 4), blocks * LANES, length - shared
    own = integer(span, 8) + (head * blocks * capacity + begin + shared - integer(span, 4)) * size
    common = integer(span, 10) + (head * blocks * common_capacity + begin) * size
    if not shared:
        multiply(short, rows, weights, own, out, stride, length, length, blocks, capacity * LANES)
        return
    multiply(short, rows, weights, common, out, stride, shared, shared, blocks, common_capacity * LANES)
    for block in range(blocks):
        at, values = out + block * LANES * 4, own + block * capacity * size
        multiply_onward(short, rows, weights + shared * rows * 4, values, at, stride, rest)


@inlined
def _look(given: int, span: int, head: int, row: int, rows: int, scratch: int) -> None:
    """Attention of ``rows`` queries of one head of keys from ``row`` on; the heads of a token are queries one after another."""
    group, key_size, value_size = integer(given, 10), integer(given, 11), integer(given, 12)
    window, start = integer(given, 14), integer(span, 2)
    nearest, farthest = start + row // group, start + (row + rows - 1) // group
    begin = max(0, nearest - window + 1) // LANES * LANES if window else 0
    length = (farthest // LANES + 1) * LANES - begin
    blocks = (value_size + LANES - 1) // LANES
    wide = max(length, blocks * LANES)
    asked = scratch
    scores = asked + max(rows * key_size, LANES) * 4
    weights = scores + rows * wide * 4
    queries, held, turned = floats(integer(given, 1)), floats(asked), floats(weights)
    for one in range(rows):
        source = (head * group + (row + one) % group) * integer(given, 2)
        source += (integer(span, 0) + (row + one) // group) * integer(given, 3)
        for place in range(key_size):
            held[place * rows + one] = queries[source + place]
    _score(given, span, head, rows, begin, length, asked, scores, weights)
    for one in range(rows):
        position, at = start + (row + one) // group, scores + one * length * 4
        first = max(0, position - window + 1 - begin) if window else 0
        share = floats(at)
        sum = _soften(given, at, length, first, position + 1 - begin, head * group + (row + one) % group)
        for place in range(length):
            turned[place * rows + one] = share[place]
        floats(asked)[one] = sum
    _weigh(given, span, head, rows, begin, length, weights, scores)
    out, said = floats(integer(given, 13)), floats(scores)
    for one in range(rows):
        to = (integer(span, 0) + (row + one) // group) * integer(given, 19)
        to += (head * group + (row + one) % group) * value_size
        share_of = float32(1.0) / floats(asked)[one]
        for place in range(value_size):
            out[to + place] = said[one * blocks * LANES + place] * share_of


@kernel
def _store(given: int) -> None:
    spans, heads = integer(given, 18), integer(given, 20)
    here, threads = thread_num(), num_threads()
    for task in range(here, integer(given, 0) * heads, threads):
        _write(given, spans + task // heads * FIELDS * 8, task % heads)


@kernel
def _attend(given: int) -> None:
    spans, heads, group = integer(given, 18), integer(given, 20), integer(given, 10)
    here, threads = thread_num(), num_threads()
    if threads == 1:
        for task in range(integer(given, 0) * heads):
            _write(given, spans + task // heads * FIELDS * 8, task % heads)
    scratch, turn = integer(given, 21) + here * integer(given, 22), 0
    for task in range(integer(given, 0) * heads):
        span, head = spans + task // heads * FIELDS * 8, task % heads
        queries = integer(span, 1) * group
        for row in range(0, queries, ROWS):
            if turn % threads == here:
                _look(given, span, head, row, min(ROWS, queries - row), scratch)
            turn += 1


ATTENDING = (_store, _attend)  # workers of `store_step` and `attend_step`


class Kind(NamedTuple):
    """What a layer's attention is like."""

    scaling: float
    window: int | None = None  # positions a query sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads] float32


@dataclass(slots=True)
class Spans:
    """Rows of a pass, as the kernel wants them: ``[rows, FIELDS]``, addresses those of one layer."""

    table: npt.NDArray[np.int64]
    address: int  # of the table
    longest: int  # position of a row's last token, at most, and one more
    halves: bool = False  # keys and values are bfloat16


def blocks_of(size: int) -> int:
    """Blocks of values of that size."""
    return -(-size // LANES)


def store(key: Tensor, value: Tensor, spans: Spans) -> None:
    """Write keys and values ``[kv_heads, total_tokens, ...]`` float32 that no query looks at yet; strides as of `attend`."""
    kv_heads, tokens, value_size = value.shape
    given = arguments(
        *(len(spans.table), 0, 0, 0),
        key.data_ptr(),
        *key.stride()[:2],
        value.data_ptr(),
        *value.stride()[:2],
        *(0, key.shape[2], value_size, 0, 0, 0, 0, 0),
        spans.address,
        *(0, kv_heads, 0, 0, spans.halves),
    )
    run(_store, given, tokens * kv_heads * (key.shape[2] + value_size))


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, kind: Kind) -> Tensor:
    """Write keys and values and attend: ``[total_tokens, heads * value_size]`` float32.

    ``query`` ``[heads, total_tokens, head_dim]``, ``key`` and ``value`` ``[kv_heads, total_tokens, ...]`` float32, each token's
    numbers of a head one after another, whatever the strides of the rest.
    """
    heads, tokens, key_size = query.shape
    kv_heads, _, value_size = value.shape
    out = query.new_zeros(tokens, heads * value_size)  # nobody looks at tokens of no row, but they must be numbers
    threads, sizes = torch.get_num_threads(), Sizes(heads, kv_heads, key_size, value_size)
    scratch = query.new_empty(threads * scratch_of(spans, sizes))
    given = (heads_of(query), heads_of(key), heads_of(value))
    step = attend_step(given, out.data_ptr(), scratch.data_ptr(), spans, sizes, kind)
    work = tokens * heads * spans.longest * (key_size + value_size)
    if threads > 1 and work >= BRIEF:  # all is stored before any thread looks
        run(_store, arguments(*step.numbers), work)
    run_step(step, work)
    return out


class Sizes(NamedTuple):
    """Heads of queries and of keys, and numbers of a key and of a value."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int


class Heads(NamedTuple):
    """Where heads of queries, keys or values are, and numbers from one head, and from one token, to the next."""

    address: int
    stride: int
    token_stride: int


def heads_of(part: Tensor) -> Heads:
    """Of ``[heads, total_tokens, size]``."""
    return Heads(part.data_ptr(), *part.stride()[:2])


def scratch_of(spans: Spans, sizes: Sizes) -> int:
    """Numbers that each thread needs for itself."""
    wide = max(spans.longest + LANES, blocks_of(sizes.value_size) * LANES)
    return ROWS * (sizes.key_size + 2 * wide) + LANES


OF_PASS = (0, 14, 18, 21, 22)  # which numbers of an `attend_step` are `of_pass`


def of_pass(spans: Spans, window: int | None, scratch: int, size: int) -> tuple[int, ...]:
    """What passes with as many tokens may have others of: rows, a layer's window, where both are told, scratch of a thread."""
    return len(spans.table), window or 0, spans.address, scratch, 4 * size


def attend_step(given: Sequence[Heads], out: int, scratch: int, spans: Spans, sizes: Sizes, kind: Kind) -> Step:
    """`attend` of queries, keys and values to ``[total_tokens, heads * value_size]`` at ``out``.

    Where several threads take part, all is to be stored before, by `store_step` of the same.
    """
    heads, kv_heads, key_size, value_size = sizes
    sinks = 0 if kind.sinks is None else kind.sinks.data_ptr()
    queries, keys, values = given
    shape = (
        heads // kv_heads,
        key_size,
        value_size,
        out,
        kind.window or 0,
        bits(kind.scaling),
        bits(kind.softcap or 0.0),
        sinks,
    )
    rest = (heads * value_size, kv_heads, scratch, 4 * scratch_of(spans, sizes), spans.halves)
    return Step(_attend, (len(spans.table), *queries, *keys, *values, *shape, spans.address, *rest))


def store_step(step: Step) -> Step:
    """What is to come before an `attend_step`, see there."""
    return Step(_store, step.numbers)
