"""What routers and replicas read of themselves, without Ray."""

import json
import logging
import re
import shutil
import subprocess
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray import serve

from cascade import SamplingParams, Speculation
from cascade.cli.top import scrape
from cascade.client import Client
from cascade.messages import Edge
from cascade.planner.cost import Profile
from deployments.ops.metrics import COMMON, SERIES
from deployments.replica import OURS, join_serves
from deployments.tier import replica_readings
from tests.in_process import House, serving
from tests.waiting import LONG_S, wait_until

PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)


served = serving()


def replica(served: House, name: str) -> dict[str, float]:
    """What a replica reads, summed over labels."""
    node = served.net.nodes[name]
    readings = list(replica_readings(node.tier, Profile(), node.server, node.downlink))
    sums: dict[str, float] = defaultdict(float)
    for reading in readings:
        assert "tier" in SERIES[reading.name].places, reading
        assert len(reading.labels) == len(SERIES[reading.name].labels), reading
        assert SERIES[reading.name].kind != "histogram"
        sums[reading.name] += reading.value
    return sums


def test_replicas_read_what_their_loops_count(served: House) -> None:
    """Guards each reading of a replica: a request moves it, and what is held goes back to nothing."""
    before = replica(served, "full")
    with Client(served.grpc) as client:
        for _ in range(2):  # the second finds the first one's prompt
            client.generate("def read(path):\n    with open(path) as file:\n        return file.read()\n", PARAMS)
    served.settle()
    after = replica(served, "full")
    for name in ("tier_passes", "tier_busy_seconds", "tier_scored_tokens", "prefix_cache_queries", "leases_taken"):
        assert after[name] > before[name], name
    assert after["tier_own_tokens"] >= before["tier_own_tokens"] + 2 * PARAMS.max_tokens
    assert 0 < after["prefix_cache_hits"] <= after["prefix_cache_queries"]
    assert (after["healthy"], after["sessions"], after["leases"], after["sessions_below"]) == (1, 0, 0, 0)
    assert after["kv_cache_usage_perc"] == 0
    assert after["kv_cache_tokens"] > 0


def test_routers_tell_ray_what_their_page_shows(served: House) -> None:
    """Guards against two truths: counters and gauges are the page's, and each value of a histogram is told once."""
    metrics = served.router.admission.metrics
    list(metrics.readings())
    with Client(served.grpc) as client:
        client.generate([5, 6, 7], PARAMS)
    served.settle()
    page, readings = scrape(served.url), list(metrics.readings())
    values: dict[str, list[float]] = {}
    for name, labels, value in readings:
        series = SERIES[name]
        assert "router" in series.places
        if series.kind == "histogram":
            values.setdefault(name, []).append(value)
        elif name != "sessions_below":
            ending = "_total" if series.kind == "counter" else ""
            key = (f"{name}{ending}", tuple(sorted(zip(series.labels, labels, strict=True))))
            assert page.samples[key] == value, key
    assert len(values.pop("inter_token_latency_seconds", ())) < PARAMS.max_tokens  # one for each piece but the first
    wanted = {series.name for series in SERIES.values() if series.kind == "histogram" and "router" in series.places}
    wanted.remove("inter_token_latency_seconds")
    assert {name for name, observed in values.items() if len(observed) == 1} == wanted
    assert values["request_prompt_tokens"] == [3]
    assert values["request_generation_tokens"] == [PARAMS.max_tokens]
    assert values["request_queue_time_seconds"][0] <= values["time_to_first_token_seconds"][0]
    assert values["time_to_first_token_seconds"][0] <= values["e2e_request_latency_seconds"][0]
    assert not [reading for reading in metrics.readings() if SERIES[reading.name].kind == "histogram"]


def failovers(served: House) -> float:
    return scrape(served.url).total("failovers_total")


def test_lost_sessions_are_failovers(served: House) -> None:
    """Guards the alert: a full replica that cannot be had is counted where it was missed; the answer is there all the same."""
    before, refused = failovers(served), served.net.refused
    refused.add("full")

    def relent() -> None:
        wait_until(lambda: failovers(served) > before)
        refused.discard("full")

    relenting = threading.Thread(target=relent)
    relenting.start()
    with Client(served.grpc) as client:
        assert len(client.generate([5, 6, 7], PARAMS).token_ids) == PARAMS.max_tokens
    relenting.join()
    served.settle()
    assert failovers(served) > before


@pytest.mark.usefixtures("always_draft")
def test_vllms_benchmark_finds_what_drafters_did(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the series that `vllm bench serve` reads: they add up to the answers' edges, whatever else begins like them."""

    def counted() -> dict[str, float]:
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=LONG_S) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if line.startswith("vllm:spec_decode"))}

    before = counted()
    served.draft_in_time(monkeypatch)
    with Client(served.grpc) as client:
        answers: list[Edge] = []

        def accepted() -> int:  # guesses may come too late on a busy machine
            params = replace(PARAMS, seed=len(answers))
            answers.append(client.generate("def read(path):\n", params, Speculation(tiers=("tiny", "medium"))).stats.drafted)
            return answers[-1].accepted

        wait_until(accepted)
    served.settle()
    drafted = sum(answers[1:], answers[0])
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    expected = dict(zip(names, (drafted.passes, drafted.proposed, drafted.accepted), strict=True))
    for position, count in enumerate(drafted.accepted_by_position):
        expected[f'num_accepted_tokens_per_pos_total{{position="{position}"}}'] = count
    grown = {name.removeprefix("vllm:spec_decode_"): value - before.get(name, 0) for name, value in counted().items()}
    assert {name: count for name, count in grown.items() if count} == {name: count for name, count in expected.items() if count}


def test_the_page_is_what_prometheus_reads(served: House) -> None:
    """Guards the page: every series of routers is on it, with a help line, and counters are 0 before they count."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=LONG_S) as answer:
        text = answer.read().decode()
    for series in SERIES.values():
        if "router" in series.places:
            assert series.kind != "counter" or f"\n{series.shown}" in text, series.name
            assert f"# HELP ray_cascade_{series.name}{'_total' if series.kind == 'counter' else ''} {series.help}" in text


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    before = {name: logging.getLogger(name).parent for name in OURS}
    yield
    for name, parent in before.items():
        logging.getLogger(name).parent = parent


def test_records_reach_serves_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a cluster's logs: what tiers and routers said was in no file. Outside a replica nothing is changed."""
    join_serves()
    assert logging.getLogger("cascade").parent is logging.getLogger()
    serves, records = logging.getLogger("ray.serve"), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(serves, "handlers", [handler])
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="one"))
    before = serves.level
    join_serves()
    serves.setLevel(logging.INFO)
    try:
        logging.getLogger("deployments.router").info("told")
        serves.setLevel(logging.ERROR)  # as Serve does when the configuration changes
        logging.getLogger("cascade.tier.tier").warning("not told")
    finally:
        serves.setLevel(before)
    assert [record.getMessage() for record in records] == ["told"]


# one list of series: what dashboards, alerts and documents say of them is what is reported


ROOT = Path(__file__).parents[2]
RULES = ROOT / "cluster" / "prometheus" / "rules.yaml"
DASHBOARD = ROOT / "cluster" / "grafana" / "cascade.json"
BY_SAMPLE = {sample: series for series in SERIES.values() for sample in series.samples}
SELECTOR = re.compile(r"(\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'\s*(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"\s*')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def panels() -> Iterator[dict[str, Any]]:
    yield from json.loads(DASHBOARD.read_text())["panels"]


def expressions() -> dict[str, str]:
    """PromQL of the dashboard and the alerts, by who says it."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    queries = {rule["alert"]: rule["expr"] for rule in rules}
    for panel in panels():
        for target in panel.get("targets", ()):
            queries[f"{panel['title']} {target['refId']}"] = target["expr"]
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    return queries | {f"${variable['name']}": variable["definition"] for variable in variables if variable["type"] == "query"}


@pytest.mark.parametrize("expression", expressions().values(), ids=expressions())
def test_every_series_asked_for_is_reported(expression: str) -> None:
    """Guards panels that stay empty and alerts that never fire: names, endings and labels are those of the list."""
    selectors = [match for match in SELECTOR.finditer(expression) if match[1].startswith("ray_")]
    assert selectors
    grouped = {"le"}
    for sample, matchers in (match.groups() for match in selectors):
        assert sample in BY_SAMPLE, f"nobody reports {sample}"
        labels = {*COMMON, *BY_SAMPLE[sample].labels}
        grouped |= labels
        for matcher in filter(None, (matchers or "").split(",")):
            match = MATCHER.fullmatch(matcher)
            assert match is not None, matcher
            assert match[1] in labels, f"{sample} has no label {match[1]}"
    for group in GROUPING.findall(expression):
        assert {label.strip() for label in group.split(",")} <= grouped, group
    counters = [match for match in selectors if BY_SAMPLE[match[1]].kind != "gauge"]
    for match in counters:  # their totals say nothing: `rate` and `increase` do, or whether there are any
        before, behind = expression[: match.start()], expression[match.end() :]
        assert re.search(r"(rate|increase)\($", before) or re.match(r"\s*(unless|offset)", behind), match[0]
        if re.search(r"(rate|increase)\($", before):
            assert behind.startswith("["), match[0]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_prometheus_takes_the_rules() -> None:
    """Guards the syntax, and what each alert fires on."""
    for command in ("check", "test"):
        file = RULES if command == "check" else ROOT / "tests" / "ops" / "rules_test.yaml"
        done = subprocess.run(["promtool", command, "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_series_are_well_formed() -> None:
    """Guards names: Prometheus' conventions, which Ray and its library enforce by dropping or renaming."""
    for series in SERIES.values():
        assert re.fullmatch(r"[a-z0-9_]+[a-z0-9]", series.name)
        assert not series.name.endswith("_total")
        assert bool(series.buckets) == (series.kind == "histogram")
        assert list(series.buckets) == sorted(series.buckets)
        assert all(bound > 0 for bound in series.buckets)  # Ray takes no others
        assert series.help.endswith(".")
