"""Where the end of a text stood before, found through chains of places that end with the same two tokens.

As in LZ77 coders: ``heads`` has for each hash of two tokens the last place that ends with such, ``before`` for each place the
one before it. Places are taken back in the order in which they came, so what is left is as if the others had never been.
"""

from typing import Any

import numpy as np
from numba import int32, uint32

from cascade.cpu.jit import arguments, inlined, integer, integers, integers32, kernel

GRAM = 2  # tokens that are hashed
TRIES = 64  # places that are looked at, the latest first
LONGEST = 64  # tokens that are compared
FOUND = 4  # numbers that `find` gives
TOKEN_BYTES = 4
Ints = np.ndarray[Any, np.dtype[np.int32]]


@inlined
def _hash(first: int, second: int, mask: int) -> Any:
    mixed = uint32(first) * uint32(0x9E3779B1) ^ uint32(second) * uint32(0x85EBCA6B)
    return int32((mixed ^ (mixed >> uint32(15))) & uint32(mask))


@kernel
def _learn(given: int) -> None:
    """Places from ``start`` to ``end`` come to the chains."""
    tokens, before, heads = integers32(integer(given, 0)), integers32(integer(given, 1)), integers32(integer(given, 2))
    for place in range(max(GRAM - 1, integer(given, 4)), integer(given, 5)):
        bucket = _hash(tokens[place - 1], tokens[place], integer(given, 3))
        before[place] = heads[bucket]
        heads[bucket] = int32(place)


@kernel
def _forget(given: int) -> None:
    """Places from ``start`` to ``end``, the last ones, leave them."""
    tokens, before, heads = integers32(integer(given, 0)), integers32(integer(given, 1)), integers32(integer(given, 2))
    for place in range(integer(given, 5) - 1, max(GRAM - 1, integer(given, 4)) - 1, -1):
        heads[_hash(tokens[place - 1], tokens[place], integer(given, 3))] = before[place]


@inlined
def _same(tokens: Any, place: int, query: Any, size: int) -> Any:
    """How many tokens before and at a place are those that a query ends with."""
    same = 0
    while same < size and same <= place and tokens[place - same] == query[size - 1 - same]:
        same += 1
    return same


@kernel
def _find(given: int) -> None:
    tokens, before, heads = integers32(integer(given, 0)), integers32(integer(given, 1)), integers32(integer(given, 2))
    end, query, size, found = integer(given, 4), integers32(integer(given, 5)), integer(given, 6), integers(integer(given, 7))
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
    found[0], found[1], found[2], found[3] = best, best_size, other, other_size


class Matches:
    """Token ids, and where the same ones stood before. At most ``limit`` are held; of more the latest half goes on.

    Some 12 to 32 bytes a token. Not for several threads at once.
    """

    def __init__(self, limit: int = 2**30) -> None:
        self._limit = limit
        self._size = 0
        self._tokens: Ints = np.empty(0, np.int32)
        self._before: Ints = np.empty(0, np.int32)
        self._heads: Ints = np.empty(0, np.int32)
        self._found = np.empty(FOUND, np.int64)
        self._found_at = self._found.ctypes.data
        self._reserve(256)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._before.nbytes + self._heads.nbytes

    @property
    def tokens(self) -> Ints:
        return self._tokens[: self._size]

    def cut(self, start: int) -> None:
        """Hold the first ``start`` tokens alone."""
        if start < self._size:
            _forget.brief(arguments(*self._addresses, start, self._size))
            self._size = start

    def extend(self, tokens: "list[int] | Ints") -> None:
        """Hold more tokens, after the others."""
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

    def find(self, query: Ints) -> tuple[int, int, int, int]:
        """Where a query's end stood before, with something after it: the place of its last token and how many are the same.

        Of the latest `TRIES` places that which has most, and that which has most of those after which another token came: the
        place is -1 where there is none. At most `LONGEST` tokens are compared, and `GRAM` must be the same.
        """
        query = query[-LONGEST:]
        return self._find(query.ctypes.data, len(query))

    def find_end(self, text: "Matches") -> tuple[int, int, int, int]:
        """`find` with the end of ``text``, which may be this one."""
        size = min(LONGEST, text._size)
        return self._find(text._addresses[0] + TOKEN_BYTES * (text._size - size), size)

    def _find(self, query: int, size: int) -> tuple[int, int, int, int]:
        """`find` with ``size`` tokens at the address ``query``."""
        if size < GRAM or not self._size:
            return (-1, 0, -1, 0)
        _find.brief(arguments(*self._addresses, self._size, query, size, self._found_at))
        best, best_size, other, other_size = self._found.tolist()
        return best, best_size, other, other_size

    def _reserve(self, room: int) -> None:
        tokens: Ints = np.empty(room, np.int32)
        tokens[: self._size] = self._tokens[: self._size]
        buckets = 1 << (room - 1).bit_length()
        self._tokens, self._before, self._heads = tokens, np.full(room, -1, np.int32), np.full(buckets, -1, np.int32)
        self._addresses = (*(part.ctypes.data for part in (self._tokens, self._before, self._heads)), buckets - 1)
        _learn.brief(arguments(*self._addresses, 0, self._size))
