"""How Ray Serve finds a replica for a lease: one that the caller prefers, unless others are less busy; else power of two."""

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

SLACK = 4  # leases that a preferred replica may have more than another
RATIO = 1.5  # or so many times as many


class PreferringRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """The preferred ones are the second argument of the call: link addresses, which replicas record in their metadata."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: of each the one with the fewest leases is tried, then those of the next."""
        candidates = list(self.apply_locality_routing(pending_request=pending_request))
        if not candidates:
            return []
        two = random.sample(candidates, min(2, len(candidates)))
        others = [self.curr_replicas[one] for one in two]
        preferred = self._preferred(pending_request, candidate_replicas)
        if not preferred:
            return [others]
        busy = self._leases([one.replica_id for one in preferred])
        if overloaded(busy, self._leases(two)):
            return [others]
        return [preferred, others]

    def _preferred(self, pending_request: PendingRequest | None, replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
        args: Sequence[Any] = () if pending_request is None else pending_request.args
        addresses = args[1] if len(args) > 1 else ()
        return [one for one in replicas if addresses and one.replica_metadata.get("address") in addresses]

    def _leases(self, replicas: Sequence[ReplicaID]) -> int | None:
        """Those of the least busy one, if Serve knows."""
        known = [self.replica_queue_len_cache.get(one) for one in replicas]
        return min((leases for leases in known if leases is not None), default=None)


def overloaded(leases: int | None, others: int | None) -> bool:
    """Whether a preferred replica has so many leases that another one is better, though it has to read the text."""
    return leases is not None and others is not None and leases > max(others + SLACK, RATIO * others)
