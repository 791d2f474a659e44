"""`cascade top`: what it shows of a running server, and how it ends."""

from dataclasses import replace

import pytest
from rich.console import RenderableType

from cascade.cli.screen import acceptance, console
from cascade.cli.top import Frame, Scrape, look, scrape, view
from cascade.client import Client, ServerInfo
from cascade.client.client import TierInfo
from cascade.errors import Unauthenticated, Unavailable
from cascade.messages import Edge
from cascade.params import SamplingParams, Speculation
from cascade.planner.chains import Worth
from deployments.gateway.admission import metrics as admission
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.gateway.admission.places import Places
from tests.cli import run
from tests.in_process import House, house, serving
from tests.waiting import first

GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=1, ignore_eos=True)
COUNTERS = """# TYPE ray_cascade_answers_total counter
ray_cascade_answers_total{outcome="length"} 2.0
ray_cascade_answers_total{outcome="stop"} 3.0
# TYPE ray_cascade_passes_total counter
ray_cascade_passes_total{drafter="tiny",verifier="full"} 7.0
# TYPE ray_cascade_inter_token_latency_seconds histogram
ray_cascade_inter_token_latency_seconds_bucket{le="+Inf"} 4.0
ray_cascade_inter_token_latency_seconds_count 4.0
ray_cascade_inter_token_latency_seconds_sum 2.0
"""


def test_counters_and_their_change() -> None:
    """Guards sums over labels, means, rates over a server that has started again, and counts of several routers."""
    now = Scrape.parse(COUNTERS)
    earlier = Scrape.parse(COUNTERS.replace("3.0", "1.0"))
    assert now.total("answers_total") == 5
    assert now.mean("inter_token_latency_seconds") == 0.5
    assert now.since(earlier).total("answers_total") == 2
    assert now.since(earlier).total("passes_total") == 0
    assert earlier.since(now) == earlier
    assert Scrape.parse("").mean("inter_token_latency_seconds") is None


def test_routers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rates of several routers behind one port: each page says whose it is, where that has a name."""
    for name in ("one", ""):
        monkeypatch.setattr(admission, "replica_name", lambda name=name: name)
        assert Scrape.parse(RouterMetrics(Places(1, 1), ("full",)).text().decode()).router == name


def words(shown: RenderableType) -> set[str]:
    """What a terminal of 120 columns shows, without lines of tables."""
    with console.capture() as captured:
        console.print(shown, width=120)
    return {*captured.get().replace("│", " ").split()}


def test_what_is_known_is_shown() -> None:
    """Guards gauges that were shown as none, why a tier drafts, shares of runner-ups, and progress of drafters that learn."""
    waiting = "# TYPE ray_cascade_num_requests_waiting gauge\nray_cascade_num_requests_waiting 7.0\n"
    metrics = RouterMetrics(Places(1, 1), ("tiny", "full"))
    student = {"kept": 3, "dropped": 1, "before": 0.31, "after": 0.475, "share": 0.42, "swaps": 6}
    metrics.learning({"answers": 240, "students": {"tiny": student}})
    tiny = TierInfo("tiny", "toy", 1, 0, 64, 32, 0, "cpu", pass_cost=((1, 0.01),))
    full = replace(tiny, name="full", pass_cost=((1, 0.04),), worth=(Worth("tiny", True, 4, 1.3),))
    edge = Edge("tiny", "full", 7, 39, 20, 27, accepted_by_rank=[18, 2], proposed_by_rank=[30, 8, 1], corrected=6, prefetched=4)
    assert "7" in words(view(Frame(0.0, scrape=Scrape.parse(waiting))))
    assert {"240", "42%", "0.310", "0.475"} <= words(view(Frame(0.0, scrape=Scrape.parse(metrics.text().decode()))))
    assert {"sampled", "4", "1.30", "0.25"} <= words(view(Frame(0.0, ServerInfo((tiny, full), 64, 16, "1"))))
    assert {"2/9", "4/6"} <= words(acceptance([edge]))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "file:///etc", "127.0.0.1:8000", "http://127.0.0.1:1/x y"])
def test_no_counters_is_one_sentence(url: str) -> None:
    """Guards against tracebacks, and against reading local files as if they were a server."""
    with pytest.raises(Unavailable, match="--url"):
        scrape(url)


served = serving()


@pytest.mark.usefixtures("always_draft")
def test_once_shows_tiers_edges_and_requests(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the frame: every tier, the edges that worked, the answers there were."""
    served.draft_in_time(monkeypatch)
    with Client(served.grpc) as client:
        edges: set[tuple[str, str]] = set()
        first(  # every tier has had its part
            lambda: client.generate("def f(", GREEDY, Speculation(tiers=("tiny", "medium"))).stats.edges,
            lambda shown: edges.update((edge.drafter, edge.verifier) for edge in shown) or len(edges - {("", "full")}) >= 2,
        )
        before = look(client, served.url)
        client.generate("def g(", GREEDY)
        after = look(client, served.url)
    code, output = run("top", "--once", "--address", served.grpc, "--url", served.url, COLUMNS="160")
    assert code == 0, output
    written = f"{after.scrape.total('generation_tokens_total'):.0f}"
    for words in ("tiny", "medium", "full", "tiny → medium", "medium → full", "running", written):
        assert words in output
    code, output = run("top", "--once", "--address", served.grpc, "--url", "http://127.0.0.1:1")
    assert (code, "no counters" in output) == (0, True)
    assert not after.problems
    assert after.scrape.since(before.scrape).total("generation_tokens_total") == GREEDY.max_tokens
    assert view(after, before) is not None


def test_ctrl_c_ends_it(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback or a wrong status when the watcher has seen enough."""
    sleeps = iter([None, KeyboardInterrupt])

    def sleep(seconds: float) -> None:
        if (raised := next(sleeps)) is not None:
            raise raised

    monkeypatch.setattr("cascade.cli.top.time.sleep", sleep)
    code, output = run("top", "--address", served.grpc, "--url", served.url, COLUMNS="160")
    assert (code, "tokens/s" in output, next(sleeps, "all")) == (0, True, "all")


def test_who_has_no_key_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards watchers of a server with keys: "HTTP Error 401: give the server's HTTP address" did not say what is missing."""
    monkeypatch.setenv("CASCADE_API_KEYS", "alice=alice-0123456789abcdef")
    monkeypatch.delenv("CASCADE_API_KEY", raising=False)
    with house() as served:
        with pytest.raises(Unauthenticated, match="this client has none: set CASCADE_API_KEY"):
            scrape(served.url)
        monkeypatch.setenv("CASCADE_API_KEY", "another-0123456789")
        with pytest.raises(Unauthenticated, match="does not know the key in CASCADE_API_KEY"):
            scrape(served.url)
