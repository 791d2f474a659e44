"""`cascade top`: what it shows of a running server, and how it ends."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from cascade.bench.scrape import Scrape, scrape
from cascade.cli.main import main
from cascade.cli.screen import acceptance, console
from cascade.cli.top import Frame, look, view
from cascade.client import Client
from cascade.errors import Unavailable
from cascade.messages import Edge
from cascade.params import SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb
from deployments.ops.metrics.page import Page
from deployments.ops.metrics.series import SERIES, Reading
from tests.conftest import LONG_S
from tests.doors import House, house

GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=1, ignore_eos=True)
COUNTERS = """# TYPE cascade_answers_total counter
cascade_answers_total{outcome="length"} 2.0
cascade_answers_total{outcome="stop"} 3.0
# TYPE cascade_passes_total counter
cascade_passes_total{drafter="tiny",verifier="full"} 7.0
# TYPE cascade_accepted_by_rank_total counter
cascade_accepted_by_rank_total{drafter="tiny",rank="1",verifier="full"} 2.0
# TYPE cascade_proposed_by_rank_total counter
cascade_proposed_by_rank_total{drafter="tiny",rank="0",verifier="full"} 30.0
cascade_proposed_by_rank_total{drafter="tiny",rank="1",verifier="full"} 8.0
cascade_proposed_by_rank_total{drafter="tiny",rank="2",verifier="full"} 1.0
# TYPE cascade_corrections_total counter
cascade_corrections_total{drafter="tiny",verifier="full"} 6.0
# TYPE cascade_prefetched_corrections_total counter
cascade_prefetched_corrections_total{drafter="tiny",verifier="full"} 4.0
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


def test_branches_are_shown() -> None:
    """Guards shares of runner-ups and of corrections against own tokens among them; an answer's table says the same."""
    edge = Edge("tiny", "full", 7, 39, 20, 27, accepted_by_rank=(18, 2), proposed_by_rank=(30, 8, 1), corrected=6, prefetched=4)
    for table in (view(Frame(0.0, scrape=Scrape.parse(COUNTERS))), acceptance([edge])):
        with console.capture() as captured:
            console.print(table, width=120)
        assert "2/9" in captured.get()
        assert "4/6" in captured.get()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "file:///etc", "127.0.0.1:8000"])
def test_no_counters_is_one_sentence(url: str) -> None:
    """Guards against tracebacks, and against reading local files as if they were a server."""
    with pytest.raises(Unavailable, match="--url"):
        scrape(url)


def drafted(client: Client) -> None:
    """Ask until every tier had its part: on a busy machine a short answer may be over before drafts come."""
    deadline = time.monotonic() + LONG_S
    edges: set[tuple[str, str]] = set()
    while not edges >= {("tiny", "medium"), ("medium", "full")}:
        assert time.monotonic() < deadline, f"only {edges} have worked"
        completion = client.generate("def f(", GREEDY, Speculation(tiers=("tiny", "medium")))
        edges |= {(edge.drafter, edge.verifier) for edge in completion.stats.edges}


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
            deadline = time.monotonic() + 60
            while len(described) < 2:  # it is at work
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors
    assert b"Tiers" in output
