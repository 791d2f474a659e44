"""Chooses a replica of the full tier: one that has scored the beginning of the text, or has the client's session."""

import hashlib
import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cascade.messages import SessionSpec
from cascade.scorer import BLOCK
from cascade.tier.block_manager import block_keys

MOST_KEYS = 1 << 16  # blocks that are remembered, a million positions
MOST_BLOCKS = 1 << 10  # blocks of one text that are compared
LEAST_SHARE = 0.25  # share of a text that a replica must have scored to be preferred
SLACK = 4  # leases that a preferred replica may have more than another
RATIO = 1.5  # or this many times as many leases


class Prefixes:
    """Remembers, by blocks, the replicas to which this router has sent prefixes.

    A replica that has keys and values of a prefix does not score it again. The least recently used blocks are forgotten first.
    For an ``affinity``, a client's session, only the replica that had it last counts.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._replicas: dict[int, dict[str, None]] = {}  # addresses by block key, the least recently used key first
        self._last: tuple[str, tuple[int, ...], tuple[int, ...]] = ("", (), ())  # salt, tokens, keys

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, spec: SessionSpec, affinity: str = "") -> tuple[str, ...]:
        """Addresses of the replicas with the longest known prefix, the last used first; none if it is too short."""
        if affinity:
            return tuple(self._replicas.get(_home(affinity, spec), ()))
        keys = self._keys(spec)
        held = list(takewhile(self._replicas.__contains__, keys))
        return tuple(reversed(self._replicas[held[-1]])) if held and len(held) >= LEAST_SHARE * len(keys) else ()

    def sent(self, spec: SessionSpec, affinity: str, address: str) -> None:
        """Note that a session was sent to the replica at ``address``."""
        for key in reversed(self._keys(spec)):  # so that ends are forgotten before beginnings
            replicas = self._replicas.pop(key, {})
            replicas.pop(address, None)
            self._replicas[key] = replicas | {address: None}
        if affinity:
            self._replicas.pop(home := _home(affinity, spec), None)
            self._replicas[home] = {address: None}
        while len(self._replicas) > self._most_keys:
            del self._replicas[next(iter(self._replicas))]

    def forget(self, address: str) -> None:
        """The replica at ``address`` is gone."""
        for key in [key for key, replicas in self._replicas.items() if address in replicas]:
            del self._replicas[key][address]
            if not self._replicas[key]:
                del self._replicas[key]

    def _keys(self, spec: SessionSpec) -> Sequence[int]:
        """Keys of the text's blocks. Texts with different salts or adapters have no key in common."""
        params = spec.params
        if params.prompt_logprobs is not None:  # such a session reuses nothing
            return ()
        salt = f"{params.adapter}\0{spec.cache_salt}"
        if self._last[:2] != (salt, spec.tokens):
            self._last = salt, spec.tokens, tuple(block_keys(spec.tokens[: BLOCK * MOST_BLOCKS], salt))
        return self._last[2]


def _home(affinity: str, spec: SessionSpec) -> int:
    """The key of a client's session, which depends on the salt."""
    return hash((affinity, spec.cache_salt))


class PreferringRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Ray Serve's choice of a replica for a lease: a preferred one, unless others are much less busy; else power of two.

    The call's second argument has the preferred ones: link addresses, which replicas record in their metadata. Without these,
    an affinity as third argument chooses one: the same at all routers, and for few affinities another when replicas change.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas by rank: the one with the fewest leases of each rank is tried before the next rank."""
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
        return min((leases for leases in counts if leases is not None), default=None)  # None if Serve does not know


def _address(replica: RunningReplica) -> str:
    return str(replica.replica_metadata.get("address", ""))


def weight(affinity: str, address: str) -> bytes:
    """The replica with the highest weight gets the session: rendezvous hashing, which needs no state."""
    return hashlib.blake2b(f"{affinity}\0{address}".encode(errors="replace"), digest_size=8).digest()


def overloaded(leases: int | None, others: int | None) -> bool:
    """Whether a preferred replica has so many leases that another one is better, although that has to prefill the text."""
    return leases is not None and others is not None and leases > max(others + SLACK, RATIO * others)
