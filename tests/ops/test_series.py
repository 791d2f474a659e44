"""One list of series: what dashboards, alerts and documents say of them is what is reported."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.ops.metrics import COMMON, SERIES

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
