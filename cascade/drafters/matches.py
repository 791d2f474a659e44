"""Finds earlier occurrences of the end of a text, and what came after them, with hash chains as in LZ77 coders.

``heads`` maps each hash of two tokens to the last place at which such a pair ends, ``before`` each place to the previous one of
its chain. Places are removed in reverse order, which leaves the chains as if they had never been added.
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
BESIDE = 4  # tokens after the other match, at most
HEAD = 4  # numbers of a result before its tokens, see `follow`
FIELDS = 8  # numbers of a search, see `follow`
TOKEN_BYTES, NUMBER_BYTES = 4, 8
Ints = np.ndarray[Any, np.dtype[np.int32]]


@inlined
def _hash(first: int, second: int, mask: int) -> Any:
    mixed = uint32(first) * uint32(0x9E3779B1) ^ uint32(second) * uint32(0x85EBCA6B)
    return int32((mixed ^ (mixed >> uint32(15))) & uint32(mask))


@inlined
def _add(index: int, start: int, end: int) -> None:
    """Add the places ``start`` to ``end`` to the chains."""
    tokens, before, heads = integers32(integer(index, 0)), integers32(integer(index, 1)), integers32(integer(index, 2))
    for place in range(max(GRAM - 1, start), end):
        bucket = _hash(tokens[place - 1], tokens[place], integer(index, 3))
        before[place] = heads[bucket]
        heads[bucket] = int32(place)


@kernel
def _learn(given: int) -> None:
    _add(integer(given, 0), integer(given, 1), integer(given, 2))


@inlined
def _replace(index: int, start: int, last_end: int, end: int, new: Any) -> None:
    tokens, before, heads = integers32(integer(index, 0)), integers32(integer(index, 1)), integers32(integer(index, 2))
    for place in range(last_end - 1, max(GRAM - 1, start) - 1, -1):
        heads[_hash(tokens[place - 1], tokens[place], integer(index, 3))] = before[place]
    for place in range(start, end):
        tokens[place] = int32(new[place - start])
    _add(index, start, end)


@inlined
def _same(tokens: Any, place: int, query: Any, size: int) -> Any:
    """How many tokens up to a place equal those at the end of a query."""
    same = 0
    while same < size and same <= place and tokens[place - same] == query[size - 1 - same]:
        same += 1
    return same


@inlined
def _search(index: int, end: int, query: Any, size: int) -> Any:
    """The places of the longest match of a query and of the longest that another token follows, each -1 if there is none; and
    both lengths. A match must have a token after it; of equally long ones the latest counts."""
    tokens, before, heads = integers32(integer(index, 0)), integers32(integer(index, 1)), integers32(integer(index, 2))
    best, best_size, other, other_size = -1, GRAM - 1, -1, GRAM - 1
    place = heads[_hash(query[size - 2], query[size - 1], integer(index, 3))]
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
    return best, other, best_size, other_size


@inlined
def _longest(places: Any, sizes: Any, own: Any, others: Any, unlike: int) -> Any:
    """The longest of four matches (two in the text, two in others) that a token other than ``unlike`` follows; -1 if none."""
    longest = -1
    for at in range(4):
        if places[at] >= 0 and (longest < 0 or sizes[at] > sizes[longest]):
            following = own[places[at] + 1] if at < 2 else others[places[at] + 1]
            if following != unlike:
                longest = at
    return longest


@inlined
def _write(tokens: Any, place: int, end: int, most: int, repeats: bool, out: Any, at: int) -> Any:
    """Write the tokens after a place, and return their number. With ``repeats`` they are repeated up to ``most``."""
    period = end - place - 1
    size = most if repeats else min(most, period)
    for i in range(size):
        out[at + i] = tokens[place + 1 + i % period]
    return size


@inlined
def _continue(index: int, end: int, most: int, others: int, others_end: int, out: Any) -> None:
    """Search for the end of a text in the text itself and in others, and write the tokens after the two best matches."""
    out[0], out[1], out[2], out[3] = 0, 0, 0, 0
    size = min(LONGEST, end)
    if size < GRAM or most <= 0:
        return
    own_tokens, other_tokens = integers32(integer(index, 0)), integers32(integer(others, 0))
    last = integers32(integer(index, 0) + TOKEN_BYTES * (end - size))
    best, other, best_size, other_size = _search(index, end, last, size)
    best_there, other_there, best_there_size, other_there_size = _search(others, others_end, last, size)
    places = (best, other, best_there, other_there)
    sizes = (best_size, other_size, best_there_size, other_there_size)
    trunk = _longest(places, sizes, own_tokens, other_tokens, -1)
    if trunk < 0:
        return
    out[2] = sizes[trunk]
    if trunk < 2:
        out[0] = _write(own_tokens, places[trunk], end, most, True, out, HEAD)
    else:
        out[0] = _write(other_tokens, places[trunk], others_end, most, False, out, HEAD)
    beside = _longest(places, sizes, own_tokens, other_tokens, out[HEAD])
    if beside < 0:
        return
    out[3] = sizes[beside]
    if beside < 2:
        out[1] = _write(own_tokens, places[beside], end, min(most, BESIDE), True, out, HEAD + out[0])
    else:
        out[1] = _write(other_tokens, places[beside], others_end, min(most, BESIDE), False, out, HEAD + out[0])


@kernel
def _follow(given: int) -> None:
    num, results, width = integer(given, 0), integer(given, 1), integer(given, 2)
    searches = given + NUMBER_BYTES * 3
    tokens = searches + NUMBER_BYTES * FIELDS * num
    for i in range(num):
        search = integers(searches + NUMBER_BYTES * FIELDS * i)
        index, end = search[0], search[3]
        _replace(index, search[1], search[2], end, integers(tokens + NUMBER_BYTES * search[5]))
        _continue(index, end, search[4], search[6], search[7], integers(results + NUMBER_BYTES * width * i))


class Matches:
    """A sequence of token ids with an index of its pairs. Beyond ``limit`` tokens only the latest half is kept.

    Takes 12 to 32 bytes a token. Not thread-safe.
    """

    def __init__(self, limit: int = 2**30) -> None:
        self.size = 0  # tokens
        self.room = 0  # capacity in tokens
        self._limit = limit
        self._tokens: Ints = np.empty(0, np.int32)
        self._before: Ints = np.empty(0, np.int32)
        self._heads: Ints = np.empty(0, np.int32)
        self.reserve(128)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._before.nbytes + self._heads.nbytes

    @property
    def tokens(self) -> Ints:
        return self._tokens[: self.size]

    def extend(self, tokens: "list[int] | Ints") -> None:
        if len(tokens) > self._limit // 2:
            tokens = tokens[-(self._limit // 2) :]
        if self.size + len(tokens) > self._limit:
            kept = self.tokens[-(self._limit // 2) :].copy()
            self.size = 0
            self._heads.fill(-1)
            self.extend(kept)
        start, end = self.size, self.size + len(tokens)
        self.reserve(end)
        self._tokens[start:end] = tokens
        self.size = end
        _learn.brief(arguments(self.address, start, self.size))

    def reserve(self, size: int) -> None:
        if size <= self.room:
            return
        self.room = room = 2 * size
        tokens: Ints = np.empty(room, np.int32)
        tokens[: self.size] = self._tokens[: self.size]
        buckets = 1 << (room - 1).bit_length()
        self._tokens, self._before, self._heads = tokens, np.full(room, -1, np.int32), np.full(buckets, -1, np.int32)
        parts = self._tokens, self._before, self._heads
        self._index = np.array([*(part.ctypes.data for part in parts), buckets - 1], np.int64)
        self.address = int(self._index.ctypes.data)
        _learn.brief(arguments(self.address, 0, self.size))


# a text without a limit, how many of its tokens stay, the tokens after these, the most tokens of a result, and other texts
Search: TypeAlias = tuple[Matches, int, Sequence[int], int, Matches]


def follow(searches: Sequence[Search]) -> list[list[int]]:
    """Update texts, and search for the end of each in itself and in others, in one call of a kernel.

    A result begins with `HEAD` numbers: how many tokens follow the longest match; how many, at most `BESIDE`, follow the
    longest match that continues differently; and the lengths of both matches. Then come the tokens. The latest `TRIES` places
    of the text and of the others are tried, at most `LONGEST` tokens are compared, and at least `GRAM` must be equal. Of
    equally long matches one in the text itself wins, then the latest. Tokens after a match in the text itself are repeated from
    its end on, since the text may have a period.
    """
    given: list[int] = []
    tokens: list[int] = []
    width = HEAD + BESIDE
    for text, start, new, most, others in searches:
        end, most = start + len(new), min(most, MOST)
        if end > text.room:
            text.reserve(end)
        given += (text.address, start, text.size, end, most, len(tokens), others.address, others.size)
        tokens += new
        width = max(width, HEAD + BESIDE + most)
    results = np.empty((len(searches), width), np.int64)
    _follow.brief(arguments(len(searches), results.ctypes.data, width, *given, *tokens))
    for text, start, new, *_ in searches:  # only now, so that no text counts as updated if the kernel raised
        text.size = start + len(new)
    listed: list[list[int]] = results.tolist()
    return listed
