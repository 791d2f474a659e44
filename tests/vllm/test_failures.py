"""Tiers on vLLM whose passes fail or hang in the middle of answers: the same texts, and nothing hangs."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cascade import Cascade, SamplingParams
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.vllm.worker import CascadeWorker
from cascade.scorer import Row
from cascade.tier import runner
from deployments.links import uplink
from tests import small
from tests.books import check_pages
from tests.links.net import Net, Node, empty, leave_hanging, opening, tidy  # noqa: F401  # fixtures
from tests.vllm.models import GREEDY, Pair


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Passes on vLLM wait for it, as on a device that no longer answers; the watchdog is quick."""
    event, forward = threading.Event(), CascadeWorker._forward
    event.set()

    def waits(worker: CascadeWorker, batch: Any) -> Any:
        event.wait()
        return forward(worker, batch)

    monkeypatch.setattr(CascadeWorker, "_forward", waits)
    monkeypatch.setattr(runner, "GRACE_S", 0.5)
    monkeypatch.setattr(uplink, "REFUSAL_S", 0.0)
    yield event
    event.set()


def test_a_pass_that_failed_may_be_tried_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards blocks that are shared in part: their copies were made again by the second try, of what the first had written."""
    base, other = pair.vllm.new_cache(), pair.vllm.new_cache()
    base.reserve(64)
    expected = pair.vllm.logits([Row(base, 0, list(range(40)), 1, GREEDY)]).clone()
    other.reuse(base, 39)
    rows = [Row(base, 34, [7] * 6, 0, GREEDY), Row(other, 39, [39], 1, GREEDY)]
    forward = CascadeWorker._forward
    with monkeypatch.context() as patch:
        patch.setattr(CascadeWorker, "_forward", lambda *args: (forward(*args), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            pair.vllm.run(rows)
    torch.testing.assert_close(pair.vllm.logits(rows), expected, rtol=1e-4, atol=1e-4)
    base.free()
    other.free()
    check_pages(pair.vllm._blocks, [])


async def test_sessions_leave_a_replica_whose_pass_hangs(empty: Net, pair: Pair, answers: threading.Event) -> None:  # noqa: F811
    """Guards answers against a full tier whose device no longer answers: they go on at another replica, with the same text."""
    request = opening(6, 1.0, 60, chain=())
    with Cascade([pair.own], Tokenizer.from_pretrained(small.paths()[-1])) as alone:
        params = SamplingParams(temperature=1.0, seed=6, max_tokens=60, ignore_eos=True)
        expected = alone.generate(list(request.spec.tokens), params)
    old, new = (Node(2, model, {}) for model in (pair.vllm, pair.own))  # type: ignore[arg-type]
    text = await leave_hanging(empty, request, old, new, answers)
    assert text == [*request.spec.tokens, *expected.token_ids]
    check_pages(pair.vllm._blocks, [])
