"""Which replicas of a tier have scored how texts begin, as far as sessions were sent there from here. Pure.

A session that begins as another one did reads nothing of that again where its keys and values are kept (`chain.block_manager`):
so it is better off at the replica that has them, unless that one is busier than others, which Ray Serve's router knows
(`deployments.links.preferring_router`).
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, TypeAlias

from cascade.chain.block_manager import block_keys
from cascade.messages import Open
from cascade.scorer import BLOCK

MOST_KEYS = 1 << 16  # blocks that are remembered: a million positions
MOST_BLOCKS = 1 << 10  # of one text that are looked at
LEAST_SHARE = 0.25  # of a text that a replica has to know, to be preferred for it

# of a session: it went where its beginning is known, or elsewhere although it is known somewhere, or nobody is known to know it
Outcome: TypeAlias = Literal["known", "elsewhere", "new"]


class Prefixes:
    """Remembers which replicas know which beginnings; the least recently used are forgotten first."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._replicas: dict[int, dict[str, None]] = {}  # addresses by block key, the least recently used key first
        self._last: tuple[str, tuple[int, ...], tuple[int, ...]] = ("", (), ())  # salt, tokens, keys

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, opening: Open) -> tuple[str, ...]:
        """Addresses of the replicas that know most of how the text begins, the last to be used first; none if it is little."""
        keys = self._keys(opening)
        known = list(takewhile(self._replicas.__contains__, keys))
        return tuple(reversed(self._replicas[known[-1]])) if known and len(known) >= LEAST_SHARE * len(keys) else ()

    def sent(self, opening: Open, address: str) -> Outcome:
        """A session was sent to the replica at ``address``, which knows its text from now on."""
        known = self.find(opening)
        for key in reversed(self._keys(opening)):  # ends are forgotten before beginnings
            replicas = self._replicas.pop(key, {})
            replicas.pop(address, None)
            self._replicas[key] = replicas | {address: None}
        while len(self._replicas) > self._most_keys:
            del self._replicas[next(iter(self._replicas))]
        return "new" if not known else "known" if address in known else "elsewhere"

    def forget(self, address: str) -> None:
        """A replica is gone."""
        for key in [key for key, replicas in self._replicas.items() if address in replicas]:
            del self._replicas[key][address]
            if not self._replicas[key]:
                del self._replicas[key]

    def _keys(self, opening: Open) -> Sequence[int]:
        """Of the text's blocks. Texts under different salts, or of different adapters, have none in common."""
        params = opening.params
        if params.prompt_logprobs is not None:  # such a session reads all of its text
            return ()
        salt = f"{params.adapter}\0{opening.cache_salt}"
        if self._last[:2] != (salt, opening.tokens):
            keys = tuple(block_keys(opening.tokens[: BLOCK * MOST_BLOCKS], salt))
            self._last = salt, opening.tokens, keys
        return self._last[2]
