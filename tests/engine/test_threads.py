"""CPU threads of a pass: the fewest that are not slower, and never another text."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from cascade import ModelError
from cascade.engine.model import Model
from cascade.engine.threads import LONG_S, Threads, apart
from cascade.params import SamplingParams
from cascade.scorer import Row
from tests.architectures import build

GREEDY = SamplingParams(temperature=0, seed=0)


class Machine:
    """A clock that passes move: ``work_s`` for each token, shared by the threads, and ``meet_s`` for each that they have."""

    def __init__(self, work_s: float, meet_s: float) -> None:
        self.now = 0.0
        self.work_s, self.meet_s = work_s, meet_s
        self.sizes: list[int] = []

    def run(self, num_tokens: int) -> None:
        threads = torch.get_num_threads()
        self.sizes.append(num_tokens)
        self.now += self.work_s * num_tokens / threads + self.meet_s * (threads - 1)

    def find(self, limit: int) -> Threads:
        return Threads.find(self.run, limit, lambda: self.now)


@pytest.fixture(autouse=True)
def threads_of_others() -> Iterator[None]:
    """The setting of this thread stays what it was."""
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


def test_small_passes_take_few_threads_and_large_ones_all() -> None:
    """Guards small models against threads that cost more than they bring, and prompts against being left with one."""
    found = Machine(work_s=1e-4, meet_s=1e-3).find(4)
    counts = [found.count(n) for n in (1, 8, 32, 128, 512)]
    assert counts[0] == 1
    assert counts[-1] == 4
    assert counts == sorted(counts)
    assert 2 in counts


def test_threads_that_bring_nothing_are_left_to_others() -> None:
    """Guards against taking more cores for the same time: a tier is not alone on its machine."""
    found = Machine(work_s=1e-6, meet_s=0.0).find(2)
    assert found.count(1) == 2, "twice as fast is worth it"
    assert Machine(work_s=0.0, meet_s=1e-9).find(2).count(1) == 1


def test_a_pause_while_threads_are_chosen_costs_no_core_for_good() -> None:
    """Guards against a neighbour's noise: passes that were held up once made a model use one core for its whole life."""
    machine = Machine(work_s=1e-4, meet_s=0.0)

    def held_up(num_tokens: int) -> None:
        machine.run(num_tokens)
        if torch.get_num_threads() > 1 and len(machine.sizes) % 8:  # most passes with several threads
            machine.now += 0.05

    assert Threads.find(held_up, 2, lambda: machine.now).count(32) == 2


def test_a_large_model_is_not_timed() -> None:
    """Guards the start of large models: what takes long even with all threads is worth them all."""
    machine = Machine(work_s=5 * LONG_S, meet_s=0.0)
    found = machine.find(4)
    assert [found.count(n) for n in (1, 512)] == [4, 4]
    assert machine.sizes == [1, 1], "once to begin, and once by the clock"


def test_a_number_that_is_given_holds_for_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ``num_threads`` against being taken for a hint."""
    model, seen = Model(build("llama"), num_threads=3), set()
    score = model.logits
    monkeypatch.setattr(model, "logits", lambda rows: seen.add(torch.get_num_threads()) or score(rows))
    for size in (1, 200):
        model.run([Row(model.new_cache(), 0, [1] * size, 1, GREEDY)])
    assert seen == {3}


def test_a_pass_that_fails_gives_the_threads_back() -> None:
    """Guards the caller's own computations after an error."""
    with pytest.raises(RuntimeError), Threads(torch.get_num_threads() + 1).use(1):
        raise RuntimeError


def test_a_thread_that_ends_leaves_no_helpers() -> None:
    """Guards passes against OpenMP's helpers of the thread that loaded the model: with more of them than cores all sleep."""
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


def test_what_fails_apart_fails_here() -> None:
    """Guards the sentence that says why a model cannot be loaded."""
    with pytest.raises(ModelError, match="no such model"):
        apart(lambda: _fail("no such model"))


def _fail(sentence: str) -> None:
    raise ModelError(sentence)
