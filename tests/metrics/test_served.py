"""What Ray's node shows of a served cascade: emulated devices, behind the real gRPC door."""

import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster.devices import Setup
from cascade import SamplingParams, Speculation
from cascade.client import Client
from deployments.app import forked
from deployments.launch.server import Server
from deployments.metrics.series import COMMON, ROUTER, SERIES
from tests.conftest import LONG_S, Cluster

APPLICATION = "counted"  # of its own: what nodes counted of others stays
SETUP = Setup("code", stretch=1.0, replicas=(1, 1, 1))
PROMPT = list(range(20, 60))
PARAMS = SamplingParams(max_tokens=48, temperature=0, seed=0, ignore_eos=True)
EDGE = {"drafter": "medium", "verifier": "full"}
NEVER_YET = {"failovers", "resumed_answers", "refused", "undrafted_answers", "num_preemptions", "tier_pass_failures"}
PERHAPS = {"corrections", "prepared_corrections", "prepared_tokens", "bare_passes", "prefix_cache_hits"}  # by chance, or none
LATER = {"drafter_agreement", "drafter_agreement_level", "acceptance_drift", "tier_worth"}  # more tokens have to be judged

Labels = dict[str, str]


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    """Three tiers of toys with a device each."""
    with Server.start(forked(SETUP.config, cluster.py_executable), port=0, name=APPLICATION) as server:
        yield server


def scraped() -> dict[str, list[tuple[Labels, float]]]:
    """What the node shows of this cascade, by the names of samples."""
    [node] = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ray_cascade_") and sample.labels.get("application") == APPLICATION:
                found[sample.name].append((sample.labels, sample.value))
    return found


def total(name: str, **labels: str) -> float:
    """Sum over the samples that have these labels."""
    return sum(value for said, value in scraped()[name] if labels.items() <= said.items())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, sorted(scraped())
        time.sleep(1.0)


def test_a_request_moves_what_nodes_show(server: Server) -> None:
    """Guards the way from routers and replicas to Prometheus: names, labels, and values that move as much as they should."""
    names = [tier.name for tier in SETUP.config.tiers]
    wait_until(lambda: {said["tier"] for said, _ in scraped()["ray_cascade_healthy"]} == {*names})
    wait_until(lambda: total("ray_cascade_full_replicas", tier=ROUTER) == 1)
    before = {name: total("ray_cascade_tier_own_tokens_total", tier=name) for name in names}
    with Client(server.address) as client:
        answer = client.generate(PROMPT, PARAMS, Speculation(tiers=("tiny", "medium")))
    [edge] = [edge for edge in answer.stats.edges if (edge.drafter, edge.verifier) == ("medium", "full")]
    wait_until(lambda: total("ray_cascade_generation_tokens_total") == len(answer.token_ids))
    wait_until(lambda: total("ray_cascade_tier_own_tokens_total", tier="full") >= before["full"] + len(answer.token_ids))
    wait_until(lambda: all(total("ray_cascade_tier_own_tokens_total", tier=name) > before[name] for name in names))
    wait_until(lambda: total("ray_cascade_sessions_below") == 0)
    assert total("ray_cascade_answers_total", outcome="length") == 1
    assert total("ray_cascade_prompt_tokens_total") == len(PROMPT)
    assert total("ray_cascade_passes_total", **EDGE) == edge.passes
    assert total("ray_cascade_accepted_tokens_total", **EDGE) == edge.accepted
    assert total("ray_cascade_accepted_by_position_total", **EDGE, position="0") == sum(edge.accepted_by_position[:1])
    assert total("ray_cascade_agreed_tokens_total", **EDGE) == edge.agreed
    for name in ("e2e_request_latency", "request_queue_time", "time_to_first_token", "request_time_per_output_token"):
        assert total(f"ray_cascade_{name}_seconds_count") == 1
    assert total("ray_cascade_request_prompt_tokens_bucket", le="64.0") == 1
    assert total("ray_cascade_request_prompt_tokens_bucket", le="32.0") == 0
    assert total("ray_cascade_leases_taken_total", tier=ROUTER, below="full") >= 1
    assert total("ray_cascade_leases_taken_total", tier="full", below="medium") == 1
    assert total("ray_cascade_prefix_cache_queries_total", tier="full") >= len(PROMPT)


def test_series_are_those_of_the_list(server: Server) -> None:
    """Guards against names and labels that only the documents know, and series that never come."""
    shown = scraped()
    left_out = NEVER_YET | LATER | PERHAPS
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
