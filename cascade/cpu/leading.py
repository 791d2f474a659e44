"""The likeliest tokens of a row, up to a share of the probability or a number, without sorting the vocabulary.

A bound is searched among powers of two, by the probability above it. So a few more tokens than necessary are returned.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numba import float32, float64, int64
from torch import Tensor

from cascade.cpu.attention import LEAST, exponential
from cascade.cpu.jit import (
    arguments,
    bits,
    floats,
    floats64,
    inlined,
    integer,
    integers,
    kernel,
    num_threads,
    power_of_two,
    real,
    run,
    swept,
    thread_num,
)

ROOM = 4096  # tokens of a row
_BLOCK = 64  # tokens examined together
_CHAIN = 128  # terms that are summed in float32
_LOWEST = 31  # powers of two by which a bound may lie below the likeliest token
_FIELDS = 8  # arguments before those of rows
_MARGIN = 2.0**-12  # relative margin of a share; the rounding errors of float32 sums are smaller


@swept
def _above(shares: Any, begin: int, end: int, bound: float) -> Any:
    sum = float32(0.0)
    for token in range(begin, end):
        sum += shares[token] if shares[token] >= bound else float32(0.0)
    return sum


@swept
def _count(shares: Any, begin: int, end: int, bound: float) -> Any:
    count = float32(0.0)
    for token in range(begin, end):
        count += float32(1.0) if shares[token] >= bound else float32(0.0)
    return count


@inlined
def _total(shares: Any, size: int, bound: float) -> Any:
    """The sum of all shares from a bound up, block by block, since long sums in float32 would lose digits."""
    sum = float64(0.0)
    for begin in range(0, size, _CHAIN):
        sum += float64(_above(shares, begin, min(size, begin + _CHAIN), bound))
    return sum


@inlined
def _lead(given: int, row: int, place: int) -> Any:
    size, room = integer(given, 1), integer(given, 2)
    scores, shares = floats(integer(given, 3) + row * size * 4), floats(place)
    tokens, held = integers(integer(given, 5) + row * room * 8), floats(integer(given, 6) + row * room * 4)
    wanted, number = real(integer(given, _FIELDS + 2 * row)), integer(given, _FIELDS + 2 * row + 1)
    for token in range(size):
        shares[token] = exponential(max(scores[token], float32(LEAST)))
    whole = _total(shares, size, float32(0.0))
    low, high = 0, _LOWEST
    while low < high:
        middle = (low + high) // 2
        bound = power_of_two(-middle)
        if _total(shares, size, bound) >= whole * float64(wanted) and _count(shares, 0, size, bound) >= float32(number):
            high = middle
        else:
            low = middle + 1
    bound, count = power_of_two(-high), 0
    for begin in range(0, size, _BLOCK):
        end = min(size, begin + _BLOCK)
        if count <= room and _count(shares, begin, end, bound) > float32(0.0):
            for token in range(begin, end):
                if shares[token] >= bound:
                    if count < room:
                        tokens[count], held[count] = token, scores[token]
                    count += 1
    enough = (
        whole > float64(0.5) and _total(shares, size, bound) >= whole * float64(wanted) and float32(count) >= float32(number)
    )
    floats64(integer(given, 7) + integer(given, 0) * 8)[row] = whole
    return int64(count) if enough else int64(room + 1)


@kernel
def _find(given: int) -> None:
    rows, size = integer(given, 0), integer(given, 1)
    counts = integers(integer(given, 7))
    here, threads = thread_num(), num_threads()
    for row in range(rows * here // threads, rows * (here + 1) // threads):
        counts[row] = _lead(given, row, integer(given, 4) + here * size * 4)


class Leading(NamedTuple):
    """The likeliest tokens of rows, ordered by id."""

    tokens: Tensor  # int64 [n, most], padded with ``V``
    scores: Tensor  # float32 [n, most], padded with -inf
    counts: list[int]  # more than ``most`` for a row without tokens here: there are too many, or its scores are NaN
    totals: Tensor  # float64 [n], sums of exp(score) over the vocabulary, to some 1e-7 of them


def leading(scores: Tensor, shares: Sequence[float], numbers: Sequence[int]) -> Leading:
    """The likeliest tokens of each row of ``scores`` ``[n, V]`` float32, whose likeliest token has 0.

    They include the likeliest ones that together have a share of the probability, and a number of the likeliest ones, with all
    tokens that are as likely as the last.
    """
    rows, size = scores.shape
    most = min(ROOM, size)
    tokens, held = torch.full((rows, most), size), scores.new_full((rows, most), -torch.inf)
    counts, totals = torch.empty(2, rows, dtype=torch.int64)
    room = scores.new_empty(torch.get_num_threads(), size)
    bounds = zip((share + _MARGIN * (1 - share) for share in shares), numbers, strict=True)
    wanted = (part for share, number in bounds for part in (bits(share), number))
    addresses = (part.data_ptr() for part in (scores, room, tokens, held, counts))
    run(_find, arguments(rows, size, most, *addresses, *wanted), scores.numel())
    counted = counts.tolist()
    most = max((count for count in counted if count <= most), default=1)
    return Leading(tokens[:, :most], held[:, :most], counted, totals.view(torch.float64))
