"""A cascade on emulated devices, served on GPUs that are not there: what Ray's node shows of it, and the benchmark's texts."""

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster.crowd import AUTO, THREE, crowd
from benchmarks.cluster.devices import Asked, Setup, simulated
from benchmarks.cluster.one import ALONE, PAIRS
from cascade import SamplingParams, Speculation
from cascade.bench.load import Mode
from cascade.client import AsyncClient, Client
from deployments.ops.launch import Server
from deployments.ops.metrics.series import ALIGNMENT, AUDITS, COMMON, ROUTER, SERIES
from tests.conftest import Cluster
from tests.waiting import LONG_S, wait_until

APPLICATION = "emulated"  # of its own: what nodes counted of others stays
SETUP = Setup(stretch=1.0)
NAMES = SETUP.config.names
EDGE = {"drafter": "medium", "verifier": "full"}
PROMPT = list(range(20, 60))
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
LOCKSTEP = Mode("lockstep", Speculation(tiers=("medium",), window=4, schedule="lockstep"))


NEVER_YET = {"failovers", "resumed_answers", "refused", "undrafted_answers", "num_preemptions", "tier_pass_failures"}
PERHAPS = {
    "corrections",
    "prefetched_corrections",
    "prefetched_tokens",
    "undrafted_passes",
    "prefix_cache_hits",
    "prefix_routes",
}  # or not
LATER = {"drafter_agreement", "drafter_agreement_level", "acceptance_drift", "tier_worth"}  # more tokens have to be judged

Labels = dict[str, str]


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    """Three tiers of toys, each with a device."""
    with Server.start(SETUP.config, port=0, name=APPLICATION) as server:
        yield server


# what Ray's node shows: first, while nothing has been counted


class Shown(defaultdict[str, list[tuple[Labels, float]]]):
    """What a node shows of this cascade, by the names of samples."""

    @classmethod
    def now(cls) -> "Shown":
        [node] = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=LONG_S) as answer:
            text = answer.read().decode()
        shown = cls(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_cascade_") and sample.labels.get("application") == APPLICATION:
                    shown[sample.name].append((sample.labels, sample.value))
        return shown

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples that have these labels."""
        return sum(value for said, value in self[f"ray_cascade_{name}"] if labels.items() <= said.items())


def when(condition: Callable[[Shown], bool]) -> Shown:
    """What is shown once that holds. The agent of a busy node gives up now and then: it is asked again, as Prometheus does."""
    shown = Shown(list)

    def holds() -> bool:
        nonlocal shown
        with contextlib.suppress(urllib.error.HTTPError):
            shown = Shown.now()
        return condition(shown)

    wait_until(holds, lambda: sorted(shown), every_s=0.5)
    return shown


def own_tokens(shown: Shown, before: Shown, least: int) -> bool:
    """Whether every tier has written tokens since, and the full one so many."""
    name = "tier_own_tokens_total"
    written = [shown.total(name, tier=tier) - before.total(name, tier=tier) for tier in NAMES]
    return all(written) and written[-1] >= least


def test_a_request_moves_what_nodes_show(server: Server) -> None:
    """Guards the way from routers and replicas to Prometheus: names, labels, and values that move as much as they should."""
    before = when(lambda shown: shown.total("healthy") == 3 and shown.total("full_replicas", tier=ROUTER) == 1)
    assert {said["tier"] for said, _ in before["ray_cascade_healthy"]} == {*NAMES}
    with Client(server.address) as client:
        answer = client.generate(PROMPT, replace(PARAMS, seed=0), Speculation(tiers=("tiny", "medium")))
    [edge] = [edge for edge in answer.stats.edges if (edge.drafter, edge.verifier) == ("medium", "full")]
    num_tokens = len(answer.token_ids)
    shown = when(
        lambda shown: (
            shown.total("generation_tokens_total") == num_tokens
            and own_tokens(shown, before, num_tokens)
            and shown.total("sessions_below") == 0
        )
    )
    assert shown.total("answers_total", outcome="length") == 1
    assert shown.total("prompt_tokens_total") == len(PROMPT)
    assert shown.total("passes_total", **EDGE) == edge.passes
    assert shown.total("accepted_tokens_total", **EDGE) == edge.accepted
    assert shown.total("accepted_by_position_total", **EDGE, position="0") == sum(edge.accepted_by_position[:1])
    assert shown.total("agreed_tokens_total", **EDGE) == edge.agreed
    for name in ("e2e_request_latency", "request_queue_time", "time_to_first_token", "request_time_per_output_token"):
        assert shown.total(f"{name}_seconds_count") == 1
    assert shown.total("request_prompt_tokens_bucket", le="64.0") == 1
    assert shown.total("request_prompt_tokens_bucket", le="32.0") == 0
    assert shown.total("leases_taken_total", tier=ROUTER, below="full") >= 1
    assert shown.total("leases_taken_total", tier="full", below="medium") == 1
    assert shown.total("prefix_cache_queries_total", tier="full") >= len(PROMPT)


def test_series_are_those_of_the_list(server: Server) -> None:
    """Guards against names and labels that only the documents know, and series that never come."""
    shown = when(lambda shown: shown.total("healthy") == 3 and shown.total("tiers") == len(NAMES))
    unasked = {series.name for series in (*AUDITS, *ALIGNMENT)}
    left_out = NEVER_YET | LATER | PERHAPS | unasked
    wanted = [one for one in SERIES.values() if {"router", "tier"} & {*one.places} and one.name not in left_out]
    for series in wanted:
        for sample in series.samples:
            assert shown[sample], sample
            for labels, _ in shown[sample]:
                assert {*COMMON, *series.labels} <= {*labels}
                assert labels["replica"]
    models = {said["tier"]: said["model"] for said, _ in shown["ray_cascade_healthy"]}
    assert models == {tier.name: tier.model_loading_config.model_id for tier in SETUP.config.tiers}
    [(router, _)] = shown["ray_cascade_tiers"]
    assert (router["tier"], router["model"]) == (ROUTER, SETUP.config.tiers[-1].model_loading_config.model_id)
    samples = {sample for series in SERIES.values() for sample in series.samples}
    assert {name for name in shown if not name.endswith("_created")} <= samples


# what answers are


def test_every_mode_writes_what_the_toy_writes_alone(server: Server) -> None:
    """Guards figures against wrong texts: leases, links, sessions and trees lose, repeat and mistake no token."""
    prompts = [PROMPT, PROMPT[5:]]
    expected = simulated(SETUP.tiers(), Asked(prompts, PARAMS), ALONE.speculation, warm_up=1).texts
    with Client(server.address) as client:
        for mode in (ALONE, *PAIRS, LOCKSTEP, THREE, AUTO):
            for seed, prompt in enumerate(prompts):
                found = client.generate(prompt, replace(PARAMS, seed=seed), mode.speculation)
                assert found.token_ids == expected[seed], mode.name


def test_clients_that_come_and_go_get_exact_texts(server: Server) -> None:
    """Guards the crowd of the benchmark: many at once, broken off in the middle."""

    async def together() -> bool:
        async with AsyncClient(server.address) as client:
            clients = crowd(client, THREE, 40, SETUP, [PROMPT, PROMPT[5:]])
            clients.grow(8)
            await clients.rate(1.0)
            await clients.stop(2)
            await clients.rate(0.3)
            await clients.stop()
        return clients.exact and clients.tokens > 0

    assert asyncio.run(together())
