"""What Ray's node shows of a served cascade: emulated devices, behind the real gRPC door."""

import contextlib
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster.devices import Setup
from cascade import SamplingParams, Speculation
from cascade.client import Client
from deployments.ops.launch import Server
from deployments.ops.metrics.series import AUDITS, COMMON, ROUTER, SERIES
from tests.conftest import LONG_S, Cluster

APPLICATION = "counted"  # of its own: what nodes counted of others stays
SETUP = Setup(stretch=1.0, replicas=(1, 1, 1))
NAMES = SETUP.config.names
PROMPT = list(range(20, 60))
PARAMS = SamplingParams(max_tokens=48, temperature=0, seed=0, ignore_eos=True)
EDGE = {"drafter": "medium", "verifier": "full"}
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
    """Three tiers of toys with a device each."""
    with Server.start(SETUP.config, port=0, name=APPLICATION) as server:
        yield server


class Shown(defaultdict[str, list[tuple[Labels, float]]]):
    """What a node shows of this cascade, by the names of samples."""

    @classmethod
    def now(cls) -> "Shown":
        [node] = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
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
    deadline, shown = time.monotonic() + LONG_S, Shown(list)
    while not condition(shown):
        assert time.monotonic() < deadline, sorted(shown)
        time.sleep(1.0)
        with contextlib.suppress(urllib.error.HTTPError):
            shown = Shown.now()
    return shown


def own_tokens(shown: Shown, before: Shown, least: int) -> bool:
    """Whether every tier has written tokens since, and the full one so many."""
    name = "tier_own_tokens_total"
    written = [shown.total(name, tier=tier) - before.total(name, tier=tier) for tier in NAMES]
    return all(written) and written[-1] >= least


def test_a_request_moves_what_nodes_show(server: Server) -> None:
    """Guards the way from routers and replicas to Prometheus: names, labels, and values that move as much as they should."""
    before = when(lambda shown: shown.total("healthy") == len(NAMES) and shown.total("full_replicas", tier=ROUTER) == 1)
    assert {said["tier"] for said, _ in before["ray_cascade_healthy"]} == {*NAMES}
    with Client(server.address) as client:
        answer = client.generate(PROMPT, PARAMS, Speculation(tiers=("tiny", "medium")))
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
    shown = when(lambda shown: shown.total("healthy") == len(NAMES) and shown.total("tiers") == len(NAMES))
    left_out = NEVER_YET | LATER | PERHAPS | {series.name for series in AUDITS}  # which nobody has asked for
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
