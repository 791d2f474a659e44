"""Finds where the end of a text occurred before, and what came after it there, with hash chains as in LZ77 coders.

``heads`` has for each hash of two tokens the last place at which such a pair ends, ``before`` for each place the previous one
of its chain. Places are removed in reverse order, which leaves the chains as if they had never been added.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numba import int32, uint32

from cascade.cpu.jit import arguments, inlined, integer, integers, integers32, kernel

GRAM = 2  # tokens that are hashed
TRIES = 64  # places of a chain that are tried, the latest first
LONGEST = 64  # tokens that are compared at most
MOST = 64  # tokens after the longest match, at most
BESIDE = 4  # the same of the other one
HEAD = 4  # numbers of a result before its tokens: each match's length, and how many tokens come after it
TOKEN_BYTES = 4
Ints = np.ndarray[Any, np.dtype[np.int32]]
Match: TypeAlias = tuple[int, list[int]]  # its length, and the tokens after it


@inlined
def _hash(first: int, second: int, mask: int) -> Any:
    mixed = uint32(first) * uint32(0x9E3779B1) ^ uint32(second) * uint32(0x85EBCA6B)
    return int32((mixed ^ (mixed >> uint32(15))) & uint32(mask))


@inlined
def _add(given: int, start: int, end: int) -> None:
    """Add the places ``start`` to ``end`` to the chains."""
    tokens, before, heads = integers32(integer(given, 0)), integers32(integer(given, 1)), integers32(integer(given, 2))
    for place in range(max(GRAM - 1, start), end):
        bucket = _hash(tokens[place - 1], tokens[place], integer(given, 3))
        before[place] = heads[bucket]
        heads[bucket] = int32(place)


@kernel
def _learn(given: int) -> None:
    """Add places to the chains."""
    _add(given, integer(given, 4), integer(given, 5))


@inlined
def _same(tokens: Any, place: int, query: Any, size: int) -> Any:
    """The number of tokens up to a place that equal those at the end of a query."""
    same = 0
    while same < size and same <= place and tokens[place - same] == query[size - 1 - same]:
        same += 1
    return same


@inlined
def _behind(tokens: Any, place: int, end: int, most: int, repeats: int, out: Any, at: int) -> Any:
    """Write the tokens after a place, and return their number. If they are to repeat, they do so until there are ``most``."""
    period = end - place - 1
    size = most if repeats != 0 else min(most, period)
    for i in range(size):
        out[at + i] = tokens[place + 1 + i % period]
    return size


@inlined
def _search(given: int, end: int, query: Any, size: int, most: int, repeats: int, out: Any) -> None:
    tokens, before, heads = integers32(integer(given, 0)), integers32(integer(given, 1)), integers32(integer(given, 2))
    best, best_size, other, other_size = -1, GRAM - 1, -1, GRAM - 1
    place = heads[_hash(query[size - 2], query[size - 1], integer(given, 3))]
    for _ in range(TRIES):
        if place < 0:
            break
        same = _same(tokens, place, query, size) if place + 1 < end else 0
        if same > best_size:
            if best >= 0 and tokens[best + 1] != tokens[place + 1]:
                other, other_size = best, best_size
            elif other >= 0 and tokens[other + 1] == tokens[place + 1]:
                other, other_size = -1, GRAM - 1
            best, best_size = place, same
        elif same > other_size and tokens[place + 1] != tokens[best + 1]:
            other, other_size = place, same
        place = before[place]
    out[0], out[1], out[2], out[3] = best_size, 0, other_size, 0
    if best >= 0:
        out[1] = _behind(tokens, best, end, most, repeats, out, HEAD)
    if other >= 0:
        out[3] = _behind(tokens, other, end, min(most, BESIDE), repeats, out, HEAD + out[1])


@kernel
def _find(given: int) -> None:
    query, size = integers32(integer(given, 5)), integer(given, 6)
    _search(given, integer(given, 4), query, size, integer(given, 7), 0, integers(integer(given, 8)))


@kernel
def _follow(given: int) -> None:
    """Remove the places from ``start`` on, add others in their stead, and find where the end occurred before."""
    tokens, before, heads = integers32(integer(given, 0)), integers32(integer(given, 1)), integers32(integer(given, 2))
    start, last_end, end, most = integer(given, 4), integer(given, 5), integer(given, 6), integer(given, 7)
    out = integers(integer(given, 8))
    for place in range(last_end - 1, max(GRAM - 1, start) - 1, -1):
        heads[_hash(tokens[place - 1], tokens[place], integer(given, 3))] = before[place]
    for place in range(start, end):
        tokens[place] = int32(integer(given, 9 + place - start))
    _add(given, start, end)
    size = min(LONGEST, end)
    if size < GRAM:
        out[0], out[1], out[2], out[3] = 0, 0, 0, 0
    else:
        _search(given, end, integers32(integer(given, 0) + TOKEN_BYTES * (end - size)), size, most, 1, out)


class Matches:
    """A sequence of token ids with an index of its pairs. Beyond ``limit`` tokens only the latest half of it is kept.

    Takes 12 to 32 bytes a token. Not thread-safe.
    """

    def __init__(self, limit: int = 2**30) -> None:
        self._limit = limit
        self._size = 0
        self._tokens: Ints = np.empty(0, np.int32)
        self._before: Ints = np.empty(0, np.int32)
        self._heads: Ints = np.empty(0, np.int32)
        self._out = np.empty(HEAD + MOST + BESIDE, np.int64)
        self._out_at = self._out.ctypes.data
        self._reserve(256)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._before.nbytes + self._heads.nbytes

    @property
    def tokens(self) -> Ints:
        return self._tokens[: self._size]

    def follow(self, start: int, tokens: Sequence[int], most: int) -> list[Match]:
        """Keep the first ``start`` tokens, append others, and `find` the end of the whole in it: one call of a kernel.

        Fewer than ``most`` tokens after a match, up to the end, are repeated: the text may have a period. For sequences without
        a limit.
        """
        end = start + len(tokens)
        if end > len(self._tokens):
            self._reserve(2 * end)
        most = min(most, MOST)
        _follow.brief(arguments(*self._addresses, start, self._size, end, most, self._out_at, *tokens))
        self._size = end
        return self._matches(most)

    def extend(self, tokens: "list[int] | Ints") -> None:
        """Append tokens."""
        if len(tokens) > self._limit // 2:
            tokens = tokens[-(self._limit // 2) :]
        if self._size + len(tokens) > self._limit:
            kept = self.tokens[-(self._limit // 2) :].copy()
            self._size = 0
            self._heads.fill(-1)
            self.extend(kept)
        start, end = self._size, self._size + len(tokens)
        if end > len(self._tokens):
            self._reserve(2 * end)
        self._tokens[start:end] = tokens
        self._size = end
        _learn.brief(arguments(*self._addresses, start, self._size))

    def find(self, text: "Matches", most: int) -> list[Match]:
        """The longest match of the end of ``text``, which may be this one, with a token after it: at most ``most`` of these.

        Then the longest match after which another token came, with `BESIDE` tokens. The latest `TRIES` places are tried, at
        most `LONGEST` tokens are compared, and at least `GRAM` must be equal.
        """
        size = min(LONGEST, text._size)
        if size < GRAM or not self._size:
            return []
        most, query = min(most, MOST), text._addresses[0] + TOKEN_BYTES * (text._size - size)
        _find.brief(arguments(*self._addresses, self._size, query, size, most, self._out_at))
        return self._matches(most)

    def _matches(self, most: int) -> list[Match]:
        """What a kernel has just written."""
        same, num, other, num_other, *tokens = self._out[: HEAD + most + BESIDE].tolist()
        matches = [(same, tokens[:num]), (other, tokens[num : num + num_other])]
        return matches if num_other else matches[: num > 0]

    def _reserve(self, room: int) -> None:
        tokens: Ints = np.empty(room, np.int32)
        tokens[: self._size] = self._tokens[: self._size]
        buckets = 1 << (room - 1).bit_length()
        self._tokens, self._before, self._heads = tokens, np.full(room, -1, np.int32), np.full(buckets, -1, np.int32)
        self._addresses = (*(part.ctypes.data for part in (self._tokens, self._before, self._heads)), buckets - 1)
        _learn.brief(arguments(*self._addresses, 0, self._size))
