"""What became of the sessions that a process has opened at the tiers below."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deployments.metrics.series import Reading


@dataclass(slots=True)
class LinkCounts:
    """Totals of the sessions opened at one tier."""

    leases: int = 0  # that were taken, held ones included
    lease_wait_s: float = 0.0  # for which sessions waited
    failed: int = 0  # sessions lost: whoever opened them goes on without, or elsewhere


def readings(counts: Mapping[str, LinkCounts], num_sessions: int) -> Iterator[Reading]:
    """Those of each tier below, by name, and that so many sessions are open."""
    yield Reading("sessions_below", (), num_sessions)
    for tier, count in counts.items():
        yield Reading("leases_taken", (tier,), count.leases)
        yield Reading("lease_wait_seconds", (tier,), count.lease_wait_s)
        yield Reading("failovers", (tier,), count.failed)
