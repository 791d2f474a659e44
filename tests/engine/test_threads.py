"""CPU threads of a pass: the fewest that are not slower, and never another text."""

import subprocess
import sys

import pytest
import torch

from cascade import ModelError
from cascade.engine.model import Model
from cascade.engine.model_config import read_config
from cascade.engine.threads import LONG_S, Threads, apart
from cascade.params import SamplingParams
from cascade.scorer import Row
from tests.architectures import build

GREEDY = SamplingParams(temperature=0, seed=0)


class Machine:
    """A clock that passes move: ``work_s`` for each token, shared by the threads, and ``meet_s`` for each that they have.

    Of the passes with several threads all but each eighth take ``pause_s`` longer.
    """

    def __init__(self, work_s: float, meet_s: float, pause_s: float = 0.0) -> None:
        self.now, self.sizes = 0.0, list[int]()
        self.work_s, self.meet_s, self.pause_s = work_s, meet_s, pause_s

    def run(self, num_tokens: int) -> None:
        threads = torch.get_num_threads()
        self.sizes.append(num_tokens)
        self.now += self.work_s * num_tokens / threads + self.meet_s * (threads - 1)
        if threads > 1 and len(self.sizes) % 8:
            self.now += self.pause_s


@pytest.mark.parametrize(
    ("machine", "limit", "expected"),
    [
        (Machine(work_s=1e-4, meet_s=1e-3), 4, {1: {1}, 128: {2, 3, 4}, 512: {4}}),
        (Machine(work_s=1e-6, meet_s=0.0), 2, {1: {2}}),  # twice as fast is worth it
        (Machine(work_s=0.0, meet_s=1e-9), 2, {1: {1}}),
        (Machine(work_s=1e-4, meet_s=0.0, pause_s=0.05), 2, {32: {2}}),
        (Machine(work_s=5 * LONG_S, meet_s=0.0), 4, {1: {4}, 512: {4}}),
    ],
    ids=["small and large passes", "free threads", "useless threads", "a noisy neighbour", "a large model"],
)
def test_passes_take_the_fewest_threads_that_are_not_slower(
    machine: Machine, limit: int, expected: dict[int, set[int]]
) -> None:
    """Guards small models against threads that cost more than they bring, prompts against being left with one, and neighbours.

    Passes that a neighbour held up once made a model use one core for its whole life. A model whose pass takes long even with
    all threads is not timed but to begin.
    """
    before = torch.get_num_threads()
    found = Threads.find(machine.run, limit, lambda: machine.now)
    assert all(found.count(size) in counts for size, counts in expected.items())
    assert [found.count(size) for size in range(1, 513)] == sorted(found.count(size) for size in range(1, 513))
    assert machine.work_s < LONG_S or machine.sizes == [1, 1]
    with pytest.raises(RuntimeError), Threads(before + 1).use(1):
        raise RuntimeError
    assert torch.get_num_threads() == before, "the caller's own setting, also after an error"


def test_a_number_that_is_given_holds_for_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ``num_threads`` against being taken for a hint."""
    model, seen = Model(build("llama"), num_threads=3), set()
    score = model.logits
    monkeypatch.setattr(model, "logits", lambda rows: seen.add(torch.get_num_threads()) or score(rows))
    for size in (1, 200):
        model.run([Row(model.new_cache(), 0, [1] * size, 1, GREEDY)])
    assert seen == {3}


def test_a_thread_that_ends_leaves_no_helpers() -> None:
    """Guards passes against OpenMP's helpers of the thread that loaded the model: with more of them than cores all sleep.

    What fails there is raised here: it says why a model cannot be loaded.
    """
    program = """if True:
        import os, time, torch
        from cascade.engine.threads import apart
        torch.set_num_threads(2)
        running = lambda: len(os.listdir("/proc/self/task"))
        before = running()
        assert apart(lambda: float(torch.ones(1000, 1000).sum())) == 1e6
        while running() > before:  # for ever, if they stay
            time.sleep(0.01)
        float(torch.ones(1000, 1000).sum())
        assert running() == before + 1
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(ModelError, match="nowhere at all"):
        apart(lambda: read_config("nowhere at all"))
