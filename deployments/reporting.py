"""What a replica of a tier reports through Ray: read beside the loop, from what that counts for itself."""

from collections.abc import Iterator
from functools import partial
from itertools import chain

from cascade.chain.profile import Profile
from cascade.chain.tier import Tier
from cascade.planner.chains import worths
from cascade.scorer import BLOCK
from cascade.settings.config import TierConfig
from deployments.links.downlink import Downlink
from deployments.links.uplink import LinkServer
from deployments.metrics.export import RayExport, report
from deployments.metrics.series import Reading, sampling


async def report_tier(config: TierConfig, tier: Tier, profile: Profile, server: LinkServer, downlink: Downlink) -> None:
    """Report until cancelled; nothing outside of Ray Serve."""
    export = RayExport.here(config.model_loading_config.model_id, config.name)
    if export is not None:
        await report(export, partial(replica_readings, tier, profile, server, downlink))


def replica_readings(tier: Tier, profile: Profile, server: LinkServer, downlink: Downlink) -> Iterator[Reading]:
    """All that a replica reports."""
    yield Reading("leases", (), len(server.leases))
    yield from chain(loop_readings(tier), memory_readings(tier), worth_readings(tier), downlink.readings())
    for tokens, seconds in profile.points:
        yield Reading("pass_seconds", (tier.name, str(tokens)), seconds)
    yield Reading("context_seconds", (tier.name,), profile.context_s)


def loop_readings(tier: Tier) -> Iterator[Reading]:
    """What the loop does."""
    stats = tier.snapshot()
    yield Reading("healthy", (), float(tier.healthy))
    yield Reading("sessions", (), tier.num_sessions)
    yield Reading("tier_passes", (), stats.passes)
    yield Reading("tier_busy_seconds", (), stats.busy_s)
    yield Reading("tier_scored_tokens", (), stats.tokens)
    yield Reading("tier_own_tokens", (), stats.own_tokens)
    yield Reading("tier_pass_failures", (), stats.failures)


def memory_readings(tier: Tier) -> Iterator[Reading]:
    """What keys and values take."""
    blocks, stats = tier.kv_admission.block_manager, tier.snapshot()
    yield Reading("kv_cache_usage_perc", (), blocks.usage)
    yield Reading("kv_cache_tokens", (), blocks.total * BLOCK)
    yield Reading("prefix_cache_queries", (), stats.asked)
    yield Reading("prefix_cache_hits", (), stats.reused)
    yield Reading("num_preemptions", (), stats.preempted)


def worth_readings(tier: Tier) -> Iterator[Reading]:
    """What the planner has measured its drafters to be worth."""
    for drafter, sampled, num_sessions, factor in worths(tier.planner.measured()):
        yield Reading("tier_worth", (drafter, sampling(sampled), str(num_sessions)), factor)
