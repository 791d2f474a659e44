"""What Ray's node shows of a served cascade, as Prometheus sees it."""

import contextlib
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable

import ray
from prometheus_client.parser import text_string_to_metric_families

from cascade import Completion, SamplingParams, Speculation
from cascade.cli.top import Scrape
from cascade.client import Client
from deployments.ops.launch import APPLICATION, Server
from deployments.ops.metrics import ALIGNMENT, COMMON, ROUTER, SERIES
from tests import small
from tests.served.test_serve import pages, settle
from tests.waiting import LONG_S, wait_until

PROMPT = list(range(20, 60))
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
LATER = {"tier_worth"}  # more tokens have to be judged
ROUNDED = 1 - 1e-6  # seconds are reported as sums of differences
HISTOGRAMS = ("e2e_request_latency", "request_queue_time", "time_to_first_token", "request_time_per_output_token")

Labels = dict[str, str]


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
        return sum(value for own_labels, value in self[f"ray_cascade_{name}"] if labels.items() <= own_labels.items())

    def since(self, before: "Shown", name: str, **labels: str) -> float:
        """How much that sum has grown, replica by replica: those that tests before have killed vanish at any time."""
        earlier = {tuple(sorted(own_labels.items())): value for own_labels, value in before[f"ray_cascade_{name}"]}
        shown = [(own, value) for own, value in self[f"ray_cascade_{name}"] if labels.items() <= own.items()]
        return sum(value - earlier.get(tuple(sorted(own.items())), 0.0) for own, value in shown)


def when(condition: Callable[[Shown], bool]) -> Shown:
    """What is shown once that holds. The agent of a busy node gives up now and then: it is asked again, as Prometheus does."""
    shown = Shown(list)

    def holds() -> bool:
        nonlocal shown
        with contextlib.suppress(urllib.error.HTTPError):
            shown = Shown.now()
        return condition(shown)

    wait_until(holds, lambda: {name: sum(value for _, value in series) for name, series in shown.items()}, every_s=0.5)
    return shown


def caught_up(shown: Shown, page: Scrape) -> bool:
    """Whether a node shows all that a router's page counts. It may be told of one counter before another."""
    return all(
        shown.total(name, replica=page.router, **dict(labels)) >= value * ROUNDED
        for (name, labels), value in page.samples.items()
        if name.endswith("_total") and name.removesuffix("_total") in SERIES
    )


def drafted(server: Server) -> list[Completion]:
    """Answers up to one with drafts of all tiers: on a busy machine a short one may be over before drafts come."""
    answers = list[Completion]()
    with Client(server.address) as client:

        def by_all() -> bool:
            answers.append(client.generate(PROMPT, PARAMS, Speculation(tiers=("tiny", "medium"))))
            return {edge.drafter for edge in answers[-1].stats.edges} >= {"tiny", "medium"}

        wait_until(by_all)
    return answers


def test_a_request_moves_what_nodes_show(server: Server) -> None:
    """Guards the way from routers and replicas to Prometheus: names, labels, and values that move as much as they should."""
    settle()
    earlier = pages(server.url)
    before = when(lambda shown: all(caught_up(shown, page) for page in earlier) and shown.total("healthy") >= 4)
    assert {labels["tier"] for labels, _ in before["ray_cascade_healthy"]} == {*small.NAMES}
    answers = drafted(server)
    settle()
    later = pages(server.url)

    def complete(shown: Shown) -> bool:
        own = [shown.since(before, "tier_own_tokens_total", tier=tier) for tier in small.NAMES]
        observed = [shown.since(before, f"{name}_seconds_count") for name in HISTOGRAMS]
        return (
            all(caught_up(shown, page) for page in later)
            and all(own)
            and own[-1] >= num_tokens
            and min(observed) >= len(answers)
            and shown.since(before, "prefix_cache_queries_total", tier="full") >= len(PROMPT)
        )

    num_tokens = sum(len(answer.token_ids) for answer in answers)
    after = when(complete)
    grown = sum(after.since(before, "generation_tokens_total", replica=page.router) for page in later)
    assert grown == num_tokens  # at living routers: for a while a node shows those too that tests before have killed
    assert after.total("leases_taken_total", tier="full", below="medium") >= 1


def test_series_are_those_of_the_list(server: Server) -> None:
    """Guards against names and labels that only the documents know, and series that come late or never."""
    left_out = LATER | {series.name for series in ALIGNMENT}
    wanted = [series for series in SERIES.values() if series.name not in left_out]
    drafted(server)  # some series begin with the first request
    samples = [sample for series in wanted for sample in series.samples]
    shown = when(lambda shown: shown.total("healthy") >= 4 and all(shown[sample] for sample in samples))
    for series in wanted:
        for sample in series.samples:
            for labels, _ in shown[sample]:
                assert {*COMMON, *series.labels} <= {*labels}
                assert labels["replica"]
    models = {labels["tier"]: labels["model"] for labels, _ in shown["ray_cascade_healthy"]}
    assert models == {name: f"small-{name}" for name in small.NAMES}
    for labels, _ in shown["ray_cascade_tiers"]:
        assert (labels["tier"], labels["model"]) == (ROUTER, "small-full")
    samples = {sample for series in SERIES.values() for sample in series.samples}
    assert {name for name in shown if not name.endswith("_created")} <= samples
