"""Finds the tokens that can be the best by ``scores + G``, without a logarithm for every token of the vocabulary.

``G`` is the Gumbel noise of `cascade.engine.sampling.own_tokens`, ``-ln(-ln(1 - u))`` for a ``u`` of random bits; its bound is:

    G(u) <= -ln u - u / 2          for -ln(1 - u) = u (1 + u / 2 + u^2 / 3 + ...) >= u exp(u / 2)

and the exponent and mantissa of ``u`` bound its logarithm. A token whose upper bound is below the lower bounds of the best ones
cannot win, also after rounding, which is monotonic. The caller computes the few tokens that are left,
so the choice does not depend on the bounds.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from numba import float32, float64, int32, int64, uint64
from torch import Tensor

from cascade.cpu.jit import (
    arguments,
    bits,
    bits_of,
    divided,
    floats,
    inlined,
    integer,
    integers,
    kernel,
    num_threads,
    real,
    run,
    thread_num,
)
from cascade.splitmix import GOLDEN

ROOM = 64  # contenders of a row at most; usually there are fewer than ten
_BLOCK = 64  # tokens examined together
_FIELDS = 9  # arguments before those of rows
_LEAST = -3.4028235e38  # the lowest score that is not filtered
_MARGIN = 2.0**-9  # hundreds of times the rounding errors of float32 logarithms, here and in the caller
_PER_BIT = math.log(2) * 2.0**-23  # the bits of a float32 are its logarithm to base 2, up to 0.09
_NO_BITS = (127 + 31) * math.log(2) + _MARGIN  # `_bound` of bits that are all 0


@inlined
def _mix(z: int) -> Any:
    z = (z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB)
    return z ^ (z >> uint64(31))


@inlined
def _random(key: int, token: int) -> Any:
    """The 64 bits of a token."""
    return _mix(key + uint64(token + 1) * uint64(GOLDEN))


@inlined
def _adjusted(logit: float, highest: float, temperature: float) -> Any:
    """A score, with the bits that PyTorch gives it."""
    return divided(logit - highest, temperature)


@inlined
def _bound(logits: Any, highest: float, temperature: float, bounds: Any, size: int, key: int) -> None:
    """Write an upper bound of score plus noise for each token, in whole blocks."""
    for token in range(size):
        share = float32(int32(_random(key, token) >> uint64(33)))  # u * 2^31, no more than it is but for rounding
        noise = float32(_NO_BITS) - float32(bits_of(share)) * float32(_PER_BIT) - share * float32(2.0**-32)
        bounds[token] = _adjusted(logits[token], highest, temperature) + noise
    for token in range(size, -(-size // _BLOCK) * _BLOCK):
        bounds[token] = float32(-math.inf)


@inlined
def _reached(score: float, random: int) -> Any:
    """A lower bound of score plus noise."""
    share = float32(int64(random >> uint64(11))) * float32(2.0**-53)  # rounded as the caller does: it counts near 1
    share = min(max(share, float32(2.0**-54)), float32(1 - 2.0**-24))
    return score + float32(-math.log(-math.log1p(-float64(share))) - _MARGIN)


@inlined
def _any(bounds: Any, begin: int, least: float) -> Any:
    """Whether a block has an upper bound that is not below a limit."""
    count = int32(0)
    for token in range(begin, begin + _BLOCK):
        count += int32(1) if bounds[token] >= least else int32(0)
    return count > 0


@inlined
def _lead(bounds: Any, size: int, tokens: Any, number: int) -> Any:
    """Put up to ``number`` tokens with the highest bounds into ``tokens``; returns how many there are."""
    held, least = 0, float32(_LEAST)
    for begin in range(0, size, _BLOCK):
        if not _any(bounds, begin, least):
            continue
        for token in range(begin, begin + _BLOCK):
            if bounds[token] >= least and (held < number or bounds[token] > least):
                held = min(held + 1, number)
                place = held - 1
                while place > 0 and bounds[tokens[place - 1]] < bounds[token]:
                    tokens[place] = tokens[place - 1]
                    place -= 1
                tokens[place] = token
                least = bounds[tokens[held - 1]] if held == number else least
    return held


@inlined
def _least(logits: Any, highest: float, temperature: float, bounds: Any, size: int, tokens: Any, number: int, key: int) -> Any:
    """A lower bound of score plus noise of the best ``number`` tokens."""
    held, least = _lead(bounds, size, tokens, number), float32(math.inf)
    for place in range(held):
        score = _adjusted(logits[tokens[place]], highest, temperature)
        least = min(least, _reached(score, _random(key, tokens[place])))
    return least if held == number else float32(_LEAST)


@inlined
def _contend(given: int, row: int, place: int) -> Any:
    """Write a row's contenders, as far as there is room; returns how many there are."""
    size, room, number, from_here = integer(given, 1), integer(given, 2), integer(given, 3), row * integer(given, 2)
    logits, bounds = floats(integer(given, 4) + row * size * 4), floats(place)
    tokens, of_row = integers(integer(given, 6) + from_here * 8), _FIELDS + 4 * row
    highest, temperature = real(integer(given, of_row + 2)), real(integer(given, of_row + 3))
    randoms, kept = integers(integer(given, 7) + from_here * 8), floats(integer(given, 8) + from_here * 4)
    key = _mix(uint64(integer(given, of_row)) + uint64(GOLDEN))
    key = _mix(key ^ uint64(integer(given, of_row + 1)))
    _bound(logits, highest, temperature, bounds, size, key)
    count, least = 0, _least(logits, highest, temperature, bounds, size, tokens, number, key)
    for begin in range(0, size, _BLOCK):
        if count > room or not _any(bounds, begin, least):
            continue
        for token in range(begin, begin + _BLOCK):
            if bounds[token] >= least:
                if count < room:
                    tokens[count], kept[count] = token, _adjusted(logits[token], highest, temperature)
                    randoms[count] = int64(_random(key, token) >> uint64(11))
                count += 1
    for free in range(count, room):
        tokens[free], randoms[free], kept[free] = 0, 0, float32(-math.inf)
    return count


@kernel
def _find(given: int) -> None:
    rows, blocks = integer(given, 0), -(-integer(given, 1) // _BLOCK)
    counts = integers(integer(given, 6) + rows * integer(given, 2) * 8)
    here, threads = thread_num(), num_threads()
    for row in range(rows * here // threads, rows * (here + 1) // threads):
        counts[row] = _contend(given, row, integer(given, 5) + here * blocks * _BLOCK * 4)


def contenders(
    logits: Tensor, noises: Sequence[tuple[int, int]], temperatures: Sequence[float], number: int
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The tokens of rows that can be one of the best ``number`` by ``scores + G``: ids, bits of the noise, scores, how many.

    Scores are ``logits`` ``[n, V]`` float32, less the highest of their row, over its temperature. ``noises`` are positions and
    seeds that are mixed; ``number`` is no more than ``V`` and `ROOM`. Returns ``[n, room]``: ids in order (int64), 53 bits
    (int64) and float32; the rest of a row is filtered tokens 0. A row is complete unless its count is more than ``room``, or
    0: then its scores are NaN.
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    room = min(ROOM, -(-size // 16) * 16)
    tokens = torch.empty(rows * (room + 1), dtype=torch.int64)  # and counts
    randoms, kept = torch.empty(rows, room, dtype=torch.int64), logits.new_empty(rows, room)
    bounds = logits.new_empty(torch.get_num_threads(), -(-size // _BLOCK) * _BLOCK)
    addresses = (part.data_ptr() for part in (logits, bounds, tokens, randoms, kept))
    of_rows = zip(noises, logits.amax(-1).tolist(), temperatures, strict=True)
    fields = (field for noise, highest, temperature in of_rows for field in (*noise, bits(highest), bits(temperature)))
    run(_find, arguments(rows, size, room, number, *addresses, *fields), logits.numel())
    return tokens[: rows * room].view(rows, room), randoms, kept, tokens[rows * room :].tolist()
