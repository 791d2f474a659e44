"""Chooses a replica of the full tier: one that knows how the text begins, or has had the client's session."""

import hashlib
import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cascade.messages import SessionSpec
from cascade.scorer import BLOCK
from cascade.tier.block_manager import block_keys

MOST_KEYS = 1 << 16  # blocks that are remembered: a million positions
MOST_BLOCKS = 1 << 10  # blocks of one text that are looked at
LEAST_SHARE = 0.25  # the share of a text that a replica has to know, to be preferred for it
SLACK = 4  # leases that a preferred replica may have more than another
RATIO = 1.5  # or so many times as many


class Prefixes:
    """Remembers which replicas have scored which prefixes, by blocks, as far as sessions were sent there from here.

    A replica that has keys and values of a prefix does not score it again. The least recently used are forgotten first.
    Of one ``affinity``, a client's session, the replica that had it last counts alone.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._replicas: dict[int, dict[str, None]] = {}  # addresses by block key, the least recently used key first
        self._last: tuple[str, tuple[int, ...], tuple[int, ...]] = ("", (), ())  # salt, tokens, keys

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, spec: SessionSpec, affinity: str = "") -> tuple[str, ...]:
        """Addresses of the replicas that know most of the prefix, the last one used first; none if it is little."""
        if affinity:
            return tuple(self._replicas.get(_home(affinity, spec), ()))
        keys = self._keys(spec)
        held = list(takewhile(self._replicas.__contains__, keys))
        return tuple(reversed(self._replicas[held[-1]])) if held and len(held) >= LEAST_SHARE * len(keys) else ()

    def sent(self, spec: SessionSpec, affinity: str, address: str) -> None:
        """Note that a session was sent to the replica at ``address``, which knows its text from now on."""
        for key in reversed(self._keys(spec)):  # ends are forgotten before beginnings
            replicas = self._replicas.pop(key, {})
            replicas.pop(address, None)
            self._replicas[key] = replicas | {address: None}
        if affinity:
            self._replicas.pop(home := _home(affinity, spec), None)
            self._replicas[home] = {address: None}
        while len(self._replicas) > self._most_keys:
            del self._replicas[next(iter(self._replicas))]

    def forget(self, address: str) -> None:
        """The replica is gone."""
        for key in [key for key, replicas in self._replicas.items() if address in replicas]:
            del self._replicas[key][address]
            if not self._replicas[key]:
                del self._replicas[key]

    def _keys(self, spec: SessionSpec) -> Sequence[int]:
        """Keys of the text's blocks. Texts under different salts, or of different adapters, have none in common."""
        params = spec.params
        if params.prompt_logprobs is not None:  # such a session scores all of its text
            return ()
        salt = f"{params.adapter}\0{spec.cache_salt}"
        if self._last[:2] != (salt, spec.tokens):
            self._last = salt, spec.tokens, tuple(block_keys(spec.tokens[: BLOCK * MOST_BLOCKS], salt))
        return self._last[2]


def _home(affinity: str, spec: SessionSpec) -> int:
    """The key of a client's session; other salts have other keys."""
    return hash((affinity, spec.cache_salt))


class PreferringRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """How Ray Serve finds a replica for a lease: a preferred one unless others are much less busy; else power of two.

    The preferred ones are the second argument of the call: link addresses, which replicas record in their metadata. If there
    are none, a word as third argument chooses one: the same everywhere, and another for few words when replicas change.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: of each rank the one with the fewest leases is tried, then those of the next."""
        candidates = list(self.apply_locality_routing(pending_request=pending_request))
        if not candidates:
            return []
        two = random.sample(candidates, min(2, len(candidates)))
        others = [self.curr_replicas[replica] for replica in two]
        args: Sequence[Any] = () if pending_request is None else pending_request.args
        addresses, affinity = (*args[1:], (), "")[:2]
        preferred = [replica for replica in candidate_replicas if addresses and _address(replica) in addresses]
        if affinity and not preferred:
            preferred = [max(candidate_replicas, key=lambda replica: weight(affinity, _address(replica)))]
        busy = self._fewest_leases([replica.replica_id for replica in preferred])
        if not preferred or overloaded(busy, self._fewest_leases(two)):
            return [others]
        return [preferred, others]

    def _fewest_leases(self, replicas: Sequence[ReplicaID]) -> int | None:
        counts = [self.replica_queue_len_cache.get(replica) for replica in replicas]
        return min((leases for leases in counts if leases is not None), default=None)  # none if Serve does not know


def _address(replica: RunningReplica) -> str:
    return str(replica.replica_metadata.get("address", ""))


def weight(affinity: str, address: str) -> bytes:
    """The replica of the highest weight has the session: rendezvous hashing, for which nobody has to remember anything."""
    return hashlib.blake2b(f"{affinity}\0{address}".encode(errors="replace"), digest_size=8).digest()


def overloaded(leases: int | None, others: int | None) -> bool:
    """Whether a preferred replica has so many leases that another one is better, though it has to read the text."""
    return leases is not None and others is not None and leases > max(others + SLACK, RATIO * others)
