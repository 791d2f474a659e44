"""`cascade top`: what it shows of a running server, and how it ends."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from cascade.bench.scrape import Scrape, scrape
from cascade.cli.main import main
from cascade.cli.screen import acceptance, console
from cascade.cli.top import Frame, look, view
from cascade.client import Client, ServerInfo
from cascade.client.responses import TierInfo
from cascade.errors import Unavailable
from cascade.messages import Edge
from cascade.params import SamplingParams, Speculation
from cascade.planner.chains import Worth
from cascade.v1 import serving_pb2 as pb
from deployments.ops.metrics.page import Page
from deployments.ops.metrics.series import SERIES, Reading
from tests.doors import House, house
from tests.waiting import LONG_S, wait_until

GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=1, ignore_eos=True)
COUNTERS = """# TYPE cascade_answers_total counter
cascade_answers_total{outcome="length"} 2.0
cascade_answers_total{outcome="stop"} 3.0
# TYPE cascade_passes_total counter
cascade_passes_total{drafter="tiny",verifier="full"} 7.0
# TYPE cascade_inter_token_latency_seconds histogram
cascade_inter_token_latency_seconds_bucket{le="+Inf"} 4.0
cascade_inter_token_latency_seconds_count 4.0
cascade_inter_token_latency_seconds_sum 2.0
"""


@contextlib.contextmanager
def counted(served: House) -> Iterator[list[object]]:
    """The requests for a description that the server gets."""
    seen: list[object] = []
    describe = served.router.Describe

    async def noted(request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        seen.append(request)
        return await describe(request, context)

    served.router.Describe = noted  # type: ignore[method-assign]
    yield seen


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["top", *arguments])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_counters_and_their_change() -> None:
    """Guards sums over labels, means, and rates over a server that has started again."""
    now = Scrape.parse(COUNTERS)
    earlier = Scrape.parse(COUNTERS.replace("3.0", "1.0"))
    assert now.total("answers_total") == 5
    assert now.edges == (("tiny", "full"),)
    assert now.mean("inter_token_latency_seconds") == 0.5
    assert now.since(earlier).total("answers_total") == 2
    assert now.since(earlier).of_edge("passes_total", "tiny", "full") == 0
    assert earlier.since(now) == earlier
    assert Scrape.parse("").mean("inter_token_latency_seconds") is None


def test_counters_have_their_router() -> None:
    """Guards rates of several routers at one port: each counts for itself."""
    assert Scrape.parse(Page("one").text().decode()).router == "one"
    assert Scrape.parse(Page().text().decode()).router == ""


def test_requests_of_now_are_shown() -> None:
    """Guards the names of gauges: requests that ran and waited were shown as none."""
    names = ("num_requests_running", "num_requests_waiting")
    text = "".join(f"# TYPE cascade_{name} gauge\ncascade_{name} {7 + place}.0\n" for place, name in enumerate(names))
    assert all(name in SERIES for name in names)
    with console.capture() as captured:
        console.print(view(Frame(0.0, scrape=Scrape.parse(text))), width=120)
    assert {"7", "8"} <= {*captured.get().replace("│", " ").split()}


def test_gain_and_price_of_draft_tiers_are_shown() -> None:
    """Guards the reason why a tier drafts or does not: what it was measured to gain, and what its passes cost."""
    tiny = TierInfo("tiny", "toy", 1, 0, 64, 32, 0, "cpu", pass_cost=((1, 0.01),))
    full = replace(tiny, name="full", pass_cost=((1, 0.04),), worth=(Worth("tiny", True, 4, 1.3),))
    with console.capture() as captured:
        console.print(view(Frame(0.0, ServerInfo((tiny, full), 64, 16, "1"))), width=120)
    shown = captured.get().replace("│", " ").split()
    assert {"sampled", "4", "1.30", "0.25"} <= {*shown}


def test_branches_are_shown() -> None:
    """Guards shares of runner-ups and of corrections against own tokens among them."""
    edge = Edge("tiny", "full", 7, 39, 20, 27, accepted_by_rank=(18, 2), proposed_by_rank=(30, 8, 1), corrected=6, prefetched=4)
    with console.capture() as captured:
        console.print(acceptance([edge]), width=120)
    assert "2/9" in captured.get()
    assert "4/6" in captured.get()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "file:///etc", "127.0.0.1:8000"])
def test_no_counters_is_one_sentence(url: str) -> None:
    """Guards against tracebacks, and against reading local files as if they were a server."""
    with pytest.raises(Unavailable, match="--url"):
        scrape(url)


def drafted(client: Client) -> None:
    """Ask until every tier had its part: on a busy machine a short answer may be over before drafts come."""
    edges: set[tuple[str, str]] = set()

    def all_worked() -> bool:
        completion = client.generate("def f(", GREEDY, Speculation(tiers=("tiny", "medium")))
        edges.update((edge.drafter, edge.verifier) for edge in completion.stats.edges)
        return edges >= {("tiny", "medium"), ("medium", "full")}

    wait_until(all_worked, lambda: edges)


def test_once_shows_tiers_edges_and_requests() -> None:
    """Guards the frame: every tier, the edges that worked, the answers there were."""
    with house() as served:
        with Client(served.grpc) as client:
            drafted(client)
            before = look(client, served.url)
            client.generate("def g(", GREEDY)
            after = look(client, served.url)
        code, output = run("--once", "--address", served.grpc, "--url", served.url)
        code_without, without = run("--once", "--address", served.grpc, "--url", "http://127.0.0.1:1")
    assert code == 0, output
    for words in ("tiny", "medium", "full", "tiny → medium", "medium → full", "running", "24"):
        assert words in output
    assert code_without == 0
    assert "no counters" in without
    assert not after.problems
    assert before.scrape is not None
    assert after.scrape is not None
    assert after.scrape.since(before.scrape).total("generation_tokens_total") == GREEDY.max_tokens
    assert view(after, before) is not None


def test_what_drafters_learn_is_shown() -> None:
    """Guards progress against being nowhere: the round that runs, those before, what the last one changed."""
    page = Page()
    said = [
        Reading("alignment_answers", (), 240.0),
        *(Reading("alignment_rounds", ("tiny", outcome), count) for outcome, count in (("kept", 3.0), ("dropped", 1.0))),
        *(Reading("alignment_agreement", ("tiny", when), share) for when, share in (("before", 0.31), ("after", 0.475))),
        Reading("alignment_progress", ("tiny",), 0.42),
        Reading("alignment_swaps", ("tiny",), 6.0),
    ]
    page.also(lambda: said)
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(view(Frame(0.0, scrape=Scrape.parse(page.text().decode()))))
    shown = console.export_text()
    for words in ("240 answers", "tiny", "42%", "0.310", "0.475"):
        assert words in shown
    numbers = next(line.split() for line in shown.splitlines() if "0.475" in line)
    assert [one for one in numbers if one.isdigit()] == ["3", "1", "6"]


def test_no_server_is_one_sentence() -> None:
    """Guards against tracebacks where nobody listens."""
    code, output = run("--once", "--address", "127.0.0.1:1", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "127.0.0.1:1" in output
    assert "Traceback" not in output


def test_ctrl_c_ends_it() -> None:
    """Guards against a traceback or a wrong status when the watcher has seen enough."""
    with house() as served, counted(served) as described:
        # as from a terminal: a test that runs in the background hands on that it ignores Ctrl-C
        heed = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from cascade.cli.main import main; main()"
        )
        command = [sys.executable, "-c", heed, "top", "--every", "0.1", "--address", served.grpc, "--url", served.url]
        environment = os.environ | {"COLUMNS": "160"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            wait_until(lambda: len(described) > 1 or process.poll() is not None)  # it is at work
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors
    assert b"Tiers" in output
