"""Attention of packed rows over the keys and values of sessions, with the tiles of `cascade.cpu.tile`.

Keys lie in blocks of sixteen positions, ``[kv_heads, capacity / 16, head_dim, 16]``, values in blocks of sixteen dimensions,
``[kv_heads, blocks, capacity, 16]``, both float32 or both bfloat16. Of bfloat16 a word is a pair: of dimensions of a key,
``[kv_heads, capacity / 16, head_dim / 2, 16, 2]``, or of positions of a value, ``[kv_heads, blocks, capacity / 2, 16, 2]``. So
scores are products of queries with keys, and outputs are products of weights with values; where the processor multiplies pairs,
queries and weights are rounded to bfloat16. An output is summed in the order of positions, and hidden positions add nothing:
its bits depend on its text alone.

A fork holds its positions in blocks of its own; the first block may begin with positions of its base. Its rows read both in the
order of positions. All rows of a pass are stored before any row attends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import float32, int32
from torch import Tensor

from cascade.cpu.jit import (
    Step,
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
    run_step,
    thread_num,
)
from cascade.cpu.processor import has_pairs
from cascade.cpu.tile import LANES, ROWS, WORD, Loop, Widened, continuer, largest, multiplier, round_all, total

ROUNDS = has_pairs()  # where keys and values are bfloat16, queries and weights are rounded to it


def _loop_of_short() -> type[Loop]:
    if not ROUNDS:
        return Widened
    from cascade.cpu.dots import Dots  # compiled on import, for processors that multiply pairs

    return Dots


# Keys and values come from memory. Without prefetches, attention of many rows takes 1.4 times as long (docs/log.md).
multiply, multiply_onward = multiplier(ahead=True), continuer()
multiply_short, multiply_short_onward = multiplier(_loop_of_short(), ahead=True), continuer(_loop_of_short())

# Places of arguments: addresses, and strides between heads and tokens in elements. `_SHORT`: keys and values are bfloat16.
_NUM_ROWS, _QUERIES, _QUERY_HEAD, _QUERY_TOKEN = range(4)
_NEW_KEYS, _KEY_HEAD, _KEY_TOKEN, _NEW_VALUES, _VALUE_HEAD, _VALUE_TOKEN = range(4, 10)
_GROUP, _KEY_SIZE, _VALUE_SIZE, _OUT, _WINDOW, _SCALING, _SOFTCAP, _SINKS = range(10, 18)
_SPANS, _OUT_TOKEN, _KV_HEADS, _SCRATCH, _SCRATCH_BYTES, _SHORT = range(18, 24)
OF_PASS = (_NUM_ROWS, _WINDOW, _SPANS, _SCRATCH, _SCRATCH_BYTES)  # the arguments that `of_pass` gives
# Fields of a span: first token, number of tokens, first position; capacity of its store, first position of the store and first
# position that counts (both 0 but for forks), capacity of a fork's base; addresses of keys and values, and those of the base.
_FIRST, _TOKENS, _START, _CAPACITY, _ORIGIN, _POSITION = range(6)
_BASE_CAPACITY, _KEYS, _VALUES, _BASE_KEYS, _BASE_VALUES = range(6, 11)
FIELDS = 11
LEAST = -87.0  # the exponential of a smaller number is denormal
LOWEST = -3.4028235e38
LARGEST = 3.3895314e38  # largest bfloat16
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4


@inlined
def exponential(x: float) -> Any:
    """``exp(x)`` for `LEAST` <= x <= 0 in float32, exact to a bit or two (Cephes)."""
    exponent = int32(x * float32(_LOG2E) - float32(0.5))  # rounds to nearest, for x is not positive
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
    """Clamp overflows of wrong drafts, since hidden positions are multiplied by 0, which must give 0."""
    return x if abs(x) <= float32(LARGEST) else float32(0.0)


@inlined
def _words(places: int, short: int) -> Any:
    """Words of so many places of the depth."""
    return (places + 1) // 2 if short else places


@inlined
def _put(address: int, place: int, number: float, short: int) -> None:
    """Store a number as float32 or, if ``short``, as bfloat16."""
    if short:
        halves(address)[place] = rounded(number)
    else:
        floats(address)[place] = number


@inlined
def _store_head(given: int, span: int, head: int) -> None:
    """Store the new keys and values of one head of a span."""
    key_size, value_size, capacity = integer(given, _KEY_SIZE), integer(given, _VALUE_SIZE), integer(span, _CAPACITY)
    blocks, short = (value_size + LANES - 1) // LANES, integer(given, _SHORT)
    new_keys, new_values = floats(integer(given, _NEW_KEYS)), floats(integer(given, _NEW_VALUES))
    keys, values, per_word = integer(span, _KEYS), integer(span, _VALUES), 2 if short else 1
    line = LANES * per_word  # numbers of a word of all lanes
    for token in range(integer(span, _TOKENS)):
        position, at = integer(span, _START) + token - integer(span, _ORIGIN), integer(span, _FIRST) + token
        source = head * integer(given, _KEY_HEAD) + at * integer(given, _KEY_TOKEN)
        to = (head * (capacity // LANES) + position // LANES) * _words(key_size, short) * line + position % LANES * per_word
        for place in range(key_size):
            _put(keys, to + place // per_word * line + place % per_word, _finite(new_keys[source + place]), short)
        source = head * integer(given, _VALUE_HEAD) + at * integer(given, _VALUE_TOKEN)
        for place in range(value_size):
            to = ((head * blocks + place // LANES) * capacity // per_word + position // per_word) * line
            _put(values, to + place % LANES * per_word + position % per_word, _finite(new_values[source + place]), short)


@inlined
def _softmax(given: int, scores: int, length: int, first: int, last: int, head: int) -> Any:
    """Turn the scores ``first`` to ``last`` at ``scores`` into weights, all others into 0; returns their sum, to divide by."""
    numbers, sinks = floats(scores), integer(given, _SINKS)
    scale, cap = real(integer(given, _SCALING)), real(integer(given, _SOFTCAP))
    if cap > 0:
        for place in range(first, last):
            numbers[place] = _tanh(numbers[place] * scale / cap) * cap
    else:
        for place in range(first, last):
            numbers[place] *= scale
    for place in range(first):
        numbers[place] = float32(LOWEST)
    for place in range(last, length):
        numbers[place] = float32(LOWEST)
    most = largest(scores, length, floats(sinks)[head] if sinks else float32(LOWEST))
    for place in range(first, last):
        numbers[place] = exponential(max(numbers[place] - most, float32(LEAST)))
    for place in range(first):
        numbers[place] = float32(0.0)
    for place in range(last, length):
        numbers[place] = float32(0.0)
    sum = total(scores, length, float32(0.0))
    if sinks:
        sum += exponential(max(floats(sinks)[head] - most, float32(LEAST)))
    return sum


@inlined
def _multiply(
    short: int, rows: int, x: int, x_stride: int, w: int, apart: int, number: int, out: int, stride: int, depth: int
) -> None:
    if short:
        multiply_short(rows, x, x_stride, w, apart, number, out, stride, depth, depth)
    else:
        multiply(rows, x, x_stride, w, apart, number, out, stride, depth, depth)


@inlined
def _multiply_onward(short: int, rows: int, x: int, x_stride: int, w: int, out: int, stride: int, depth: int) -> None:
    if short:
        multiply_short_onward(rows, x, x_stride, w, 0, out, stride, depth, depth)
    else:
        multiply_onward(rows, x, x_stride, w, 0, out, stride, depth, depth)


@inlined
def _score(
    given: int, span: int, head: int, rows: int, begin: int, length: int, queries: int, between: int, scores: int, spare: int
) -> None:
    """Scores of ``rows`` queries, ``between`` words apart, with ``length`` keys from position ``begin`` on.

    Those of a fork's base come first. ``spare`` is room for one block of scores.
    """
    short, capacity, shared = integer(given, _SHORT), integer(span, _CAPACITY), max(0, integer(span, _POSITION) - begin)
    depth = _words(integer(given, _KEY_SIZE), short)
    apart, size = depth * LANES, depth * LANES * WORD
    own = integer(span, _KEYS) + (head * (capacity // LANES) + (begin - integer(span, _ORIGIN)) // LANES) * size
    base = integer(span, _BASE_KEYS) + (head * (integer(span, _BASE_CAPACITY) // LANES) + begin // LANES) * size
    before = -(-shared // LANES)
    _multiply(short, rows, queries, between, base, apart, before, scores, length, depth)
    after, to = length // LANES - before, scores + before * LANES * 4
    _multiply(short, rows, queries, between, own + before * size, apart, after, to, length, depth)
    if shared % LANES:  # the block in which the fork begins has positions of both
        block = shared // LANES * LANES
        _multiply(short, rows, queries, between, own + block // LANES * size, apart, 1, spare, LANES, depth)
        numbers, products = floats(scores), floats(spare)
        for row in range(rows):
            for lane in range(shared % LANES, LANES):
                numbers[row * length + block + lane] = products[row * LANES + lane]


@inlined
def _weigh_values(
    given: int, span: int, head: int, rows: int, begin: int, length: int, weights: int, between: int, out: int, spare: int
) -> None:
    """Sums of ``length`` values from position ``begin`` on, by ``weights`` whose rows are ``between`` words apart.

    Those of a fork's base come first. ``spare`` is room for a pair of all lanes.
    """
    short, blocks = integer(given, _SHORT), (integer(given, _VALUE_SIZE) + LANES - 1) // LANES
    shared, per_word, line, stride = max(0, integer(span, _POSITION) - begin), 2 if short else 1, LANES * WORD, blocks * LANES
    apart, base_apart = integer(span, _CAPACITY) // per_word * LANES, integer(span, _BASE_CAPACITY) // per_word * LANES
    own = integer(span, _VALUES) + (head * blocks * apart) * WORD + (begin - integer(span, _ORIGIN)) // per_word * line
    base = integer(span, _BASE_VALUES) + (head * blocks * base_apart) * WORD + begin // per_word * line
    depth, whole = length // per_word, shared // per_word
    step = WORD if ROUNDS else per_word * WORD  # bytes of a row's weights that a word of values meets
    if not shared:
        _multiply(short, rows, weights, between, own, apart, blocks, out, stride, depth)
        return
    if whole:
        _multiply(short, rows, weights, between, base, base_apart, blocks, out, stride, whole)
    else:
        sums = floats(out)
        for place in range(rows * stride):
            sums[place] = float32(0.0)
    mixed = shared % per_word  # 1: the fork begins within a pair
    for block in range(blocks):
        at, values, first = out + block * line, own + block * apart * WORD, whole + mixed
        if mixed:
            pairs, even, odd = (
                halves(spare),
                halves(base + (block * base_apart + whole * LANES) * WORD),
                halves(values + whole * line),
            )
            for lane in range(LANES):
                pairs[2 * lane], pairs[2 * lane + 1] = even[2 * lane], odd[2 * lane + 1]
            _multiply_onward(short, rows, weights + whole * step, between, spare, at, stride, 1)
        if first < depth:
            _multiply_onward(short, rows, weights + first * step, between, values + first * line, at, stride, depth - first)


@inlined
def _attend_rows(given: int, span: int, head: int, row: int, rows: int, scratch: int) -> None:
    """Attend with ``rows`` queries of one key head from ``row`` on; the query heads of a token are consecutive rows."""
    group, key_size, value_size = integer(given, _GROUP), integer(given, _KEY_SIZE), integer(given, _VALUE_SIZE)
    window, start, rounds = integer(given, _WINDOW), integer(span, _START), ROUNDS and integer(given, _SHORT)
    nearest, farthest = start + row // group, start + (row + rows - 1) // group
    begin = max(0, nearest - window + 1) // LANES * LANES if window else 0
    length = (farthest // LANES + 1) * LANES - begin
    blocks = (value_size + LANES - 1) // LANES
    wide = max(length, blocks * LANES)
    spare, even = scratch + ROWS * 4, _words(key_size, 1) * 2
    packed = spare + LANES * WORD
    scores = packed + rows * even * 4
    rest = scores + rows * wide * 4
    queries, sums = floats(integer(given, _QUERIES)), floats(scratch)
    for query in range(rows):
        source = (head * group + (row + query) % group) * integer(given, _QUERY_HEAD)
        source += (integer(span, _FIRST) + (row + query) // group) * integer(given, _QUERY_TOKEN)
        line = query * even
        for place in range(key_size):
            _put(packed, line + place, queries[source + place], rounds)
        for place in range(key_size, even):
            _put(packed, line + place, float32(0.0), rounds)
    _score(given, span, head, rows, begin, length, packed, even // 2 if rounds else even, scores, rest)
    for query in range(rows):
        position, at = start + (row + query) // group, scores + query * length * 4
        first = max(0, position - window + 1 - begin) if window else 0
        sums[query] = _softmax(given, at, length, first, position + 1 - begin, head * group + (row + query) % group)
        if rounds:
            round_all(at, rest + query * length * 2, length)
    weights, weighted, between = (rest, scores, length // 2) if rounds else (scores, rest, length)
    _weigh_values(given, span, head, rows, begin, length, weights, between, weighted, spare)
    out, products = floats(integer(given, _OUT)), floats(weighted)
    for query in range(rows):
        to = (integer(span, _FIRST) + (row + query) // group) * integer(given, _OUT_TOKEN)
        to += (head * group + (row + query) % group) * value_size
        share = float32(1.0) / sums[query]
        for place in range(value_size):
            out[to + place] = products[query * blocks * LANES + place] * share


@kernel
def _store(given: int) -> None:
    spans, heads = integer(given, _SPANS), integer(given, _KV_HEADS)
    here, threads = thread_num(), num_threads()
    for task in range(here, integer(given, _NUM_ROWS) * heads, threads):
        _store_head(given, spans + task // heads * FIELDS * 8, task % heads)


@kernel
def _attend(given: int) -> None:
    spans, heads, group = integer(given, _SPANS), integer(given, _KV_HEADS), integer(given, _GROUP)
    here, threads = thread_num(), num_threads()
    scratch, turn = integer(given, _SCRATCH) + here * integer(given, _SCRATCH_BYTES), 0
    for task in range(integer(given, _NUM_ROWS) * heads):
        span, head = spans + task // heads * FIELDS * 8, task % heads
        queries = integer(span, _TOKENS) * group
        for row in range(0, queries, ROWS):
            if turn % threads == here:
                _attend_rows(given, span, head, row, min(ROWS, queries - row), scratch)
            turn += 1


ATTENDING = (_store, _attend)  # workers of `store_step` and `attend_step`


class Kind(NamedTuple):
    """How a layer attends."""

    scaling: float
    window: int | None = None  # positions a query sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]; for this kernel in float32


@dataclass(slots=True)
class Spans:
    """The rows of a pass for the kernel, ``[rows, FIELDS]``, with the addresses of one layer."""

    table: npt.NDArray[np.int64]
    address: int  # the table's address
    longest: int  # positions of the longest row
    halves: bool = False  # keys and values are bfloat16


def blocks_of(size: int) -> int:
    """Blocks of sixteen that hold ``size`` numbers."""
    return -(-size // LANES)


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, kind: Kind) -> Tensor:
    """Store keys and values and attend: returns ``[total_tokens, heads * value_size]`` float32.

    ``query`` ``[heads, total_tokens, head_dim]``, ``key`` and ``value`` ``[kv_heads, total_tokens, ...]`` are float32; only
    their last dimension must be contiguous.
    """
    heads, tokens, key_size = query.shape
    kv_heads, _, value_size = value.shape
    out = query.new_zeros(tokens, heads * value_size)  # tokens of no row must be finite, too
    sizes = Sizes(heads, kv_heads, key_size, value_size)
    scratch = query.new_empty(torch.get_num_threads() * scratch_of(spans, sizes))
    given = (heads_of(query), heads_of(key), heads_of(value))
    step = attend_step(given, out.data_ptr(), scratch.data_ptr(), spans, sizes, kind)
    work = tokens * heads * spans.longest * (key_size + value_size)
    run_step(store_step(step), work)
    run_step(step, work)
    return out


class Sizes(NamedTuple):
    """Numbers of query and key heads, and sizes of a key and a value."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int


class Heads(NamedTuple):
    """Address of queries, keys or values, and strides between heads and tokens in elements."""

    address: int
    stride: int
    token_stride: int


def heads_of(part: Tensor) -> Heads:
    """The `Heads` of ``[heads, total_tokens, size]``."""
    return Heads(part.data_ptr(), *part.stride()[:2])


def scratch_of(spans: Spans, sizes: Sizes) -> int:
    """Scratch of each thread, in float32 elements."""
    wide = max(spans.longest + LANES, blocks_of(sizes.value_size) * LANES)
    return ROWS * (1 + sizes.key_size + 1 + 2 * wide) + LANES


def of_pass(spans: Spans, window: int | None, scratch: int, size: int) -> tuple[int, ...]:
    """The arguments at `OF_PASS`, which may differ between passes with the same number of tokens."""
    return len(spans.table), window or 0, spans.address, scratch, 4 * size


def attend_step(given: Sequence[Heads], out: int, scratch: int, spans: Spans, sizes: Sizes, kind: Kind) -> Step:
    """The step of `attend`, which writes ``[total_tokens, heads * value_size]`` to the address ``out``.

    Its `store_step` must run before.
    """
    heads, kv_heads, key_size, value_size = sizes
    queries, keys, values = given
    sinks = 0 if kind.sinks is None else kind.sinks.data_ptr()
    form = kind.window or 0, bits(kind.scaling), bits(kind.softcap or 0.0), sinks
    shape = heads // kv_heads, key_size, value_size, out, *form
    rest = (heads * value_size, kv_heads, scratch, 4 * scratch_of(spans, sizes), spans.halves)
    return Step(_attend, (len(spans.table), *queries, *keys, *values, *shape, spans.address, *rest))


def store_step(step: Step) -> Step:
    """The step that stores the keys and values of an `attend_step`."""
    return Step(_store, step.numbers)
