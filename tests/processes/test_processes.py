"""A cascade whose lower tiers are processes: the text of the full model, whatever dies, and nothing left behind."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from cascade import Cascade, Completion, ConfigError, ModelError, SamplingParams, Speculation, Structured, placement
from cascade.chain.policy import Policy
from cascade.processes import tier_process
from cascade.processes.lower_tiers import pay
from tests import small
from tests.cases import crossed, rare

PROMPT = "def read(path):\n    with open(path) as file:\n"
CHAINS = {"both": ("tiny", "medium"), "medium": ("medium",), "tiny": ("tiny",), "lookup": ("lookup", "tiny")}
PAIR = small.paths()[:2]


@pytest.fixture(scope="module")
def cascade() -> Iterator[Cascade]:
    """The small models and a drafter, after which nothing of it is left."""
    threads, descriptors = set(threading.enumerate()), open_files()
    with small.cascade(drafter="lookup", processes=True) as cascade:
        assert cascade.lower is not None
        pids = [process.pid for process in cascade.lower.processes]
        assert [os.getpgid(pid) for pid in pids] == pids, "Ctrl-C is for the parent"
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}, "processors are shared among sessions first, see sched(7)"
        yield cascade
        wait_until(lambda: idle(cascade))
    assert not any(map(psutil.pid_exists, pids))
    assert not [thread.name for thread in {*threading.enumerate()} - threads if thread.name != "tqdm_monitor"]
    assert len(open_files()) <= len(descriptors)


def open_files() -> list[str]:
    """Sockets and pipes of this process: what leaks. (Libraries keep files of their own.)"""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # that of the folder itself
    return [target for target in found if target.startswith(("socket:", "pipe:"))]


def idle(cascade: Cascade) -> bool:
    """Nobody has a session."""
    assert cascade.lower is not None
    found = [process.status() for process in cascade.lower.processes]
    return cascade.tiers[-1].num_sessions == 0 and all(status is not None and not status.num_sessions for status in found)


def wait_until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120  # imports of a process that starts again, on a busy machine
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def used(completion: Completion, drafter: str) -> int:
    """Guesses of ``drafter`` that were right."""
    return sum(edge.accepted for edge in completion.stats.edges if edge.drafter == drafter)


PARAMS = {
    "greedy": SamplingParams(max_tokens=50, temperature=0),
    "sampled": SamplingParams(max_tokens=50, temperature=0.8, seed=1),
    "penalties": SamplingParams(max_tokens=50, temperature=0.8, seed=2, frequency_penalty=0.5, repetition_penalty=1.1),
    "logprobs": SamplingParams(max_tokens=50, temperature=0.8, seed=3, logprobs=2),
}


@pytest.mark.parametrize(("params", "tiers"), crossed(PARAMS, CHAINS))
def test_text_is_the_full_models(cascade: Cascade, params: SamplingParams, tiers: tuple[str, ...]) -> None:
    """Guards the promise, and that drafts are used: any tiers of other processes give the text of the full one alone."""
    alone = cascade.generate(PROMPT, params, Speculation("off"))
    waits = "lookup" not in tiers  # which has nothing to say of most texts, and a whole window is waited for
    for schedule in ("async", "lockstep") if waits else ("async",):
        other = cascade.generate(PROMPT, params, Speculation(tiers=tiers, schedule=schedule))  # type: ignore[arg-type]
        assert (other.text, other.token_ids, other.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)
        assert [one.top for one in other.logprobs] == [one.top for one in alone.logprobs]
        assert {edge.drafter for edge in other.stats.edges} <= {"", *tiers}
        assert schedule == "async" or sum(edge.proposed for edge in other.stats.edges) > 0


def test_lower_tiers_follow_grammars(cascade: Cascade) -> None:
    """Guards grammars below: a process without the tokenizer's vocabulary refuses such requests, and drafts nothing."""
    params = SamplingParams(max_tokens=60, temperature=0, structured=Structured(regex=r"(alpha|beta){8}"))
    alone = cascade.generate(PROMPT, params, Speculation("off"))
    for tiers in (("tiny",), ("medium",)):
        drafted = cascade.generate(PROMPT, params, Speculation(tiers=tiers, schedule="lockstep"))
        assert drafted.text == alone.text
        assert used(drafted, tiers[0]) > 0


def test_drafters_are_inside_the_tiers_of_other_processes(cascade: Cascade) -> None:
    """Guards drafters that are made anew where a tier lives: all have one, as the caller has said."""
    params, found = SamplingParams(max_tokens=80, temperature=0), set[tuple[str, str]]()

    def everywhere() -> bool:
        drafted = cascade.generate(PROMPT * 3, params, Speculation(tiers=("lookup", "medium")))
        found.update((edge.drafter, edge.verifier) for edge in drafted.stats.edges if edge.accepted)
        return found >= {("lookup", "full"), ("lookup", "medium")}

    wait_until(everywhere)


def test_a_crowd_gets_the_same_texts(cascade: Cascade) -> None:
    """Guards batching over links: many sessions at once, some of which end early, get the texts that they get alone."""
    prompts = [PROMPT, "import os\n", "class Node:\n", "x = ["]
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=9)
    alone = [cascade.generate(prompt, params, Speculation("off")).text for prompt in prompts]
    assert [completion.text for completion in cascade.generate(prompts * 3, params)] == alone * 3


@pytest.mark.parametrize("victim", ["medium", rare("tiny", id="tiny")])
def test_a_killed_process_is_a_pause(cascade: Cascade, victim: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards an answer against the death of a drafter: same text, one warning, and the tier is back after a while."""
    assert cascade.lower is not None
    [process] = [process for process in cascade.lower.processes if process.spec.name == victim]
    everyone, pid = Speculation(tiers=("tiny", "medium")), process.pid
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=5, ignore_eos=True)
    expected = cascade.generate(PROMPT, params, Speculation("off")).text
    with caplog.at_level(logging.WARNING):
        pieces = cascade.stream(PROMPT, params, everyone)
        text = next(pieces).text
        os.kill(pid, signal.SIGKILL)
        text += "".join(piece.text for piece in pieces)
        wait_until(lambda: process.pid != pid and process.ready)
    assert text == expected
    assert [record.message for record in caplog.records] == [
        f"The process of tier {victim} has died (signal 9): drafts go on without it, and it starts again in 1 s"
    ]

    def drafts() -> bool:
        asked = SamplingParams(max_tokens=30, temperature=0)
        return used(cascade.generate(PROMPT, asked, Speculation(tiers=(victim,))), victim) > 0

    wait_until(drafts)
    assert not psutil.pid_exists(pid)


def test_a_process_that_cannot_start_again_is_tried_again(cascade: Cascade, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the thread that watches: a new process that died, or could not be made at all, was the end of it."""
    assert cascade.lower is not None
    process, command = cascade.lower.processes[0], tier_process.COMMAND
    tries: list[str] = []

    def begin(arguments: list[str], **options: Any) -> Any:
        tries.append(arguments[3])
        if len(tries) == 1:
            raise OSError("no more processes")
        return popen([*arguments[:3], "raise SystemExit(3)" if len(tries) == 2 else command, *arguments[4:]], **options)

    popen = subprocess.Popen
    monkeypatch.setattr(tier_process, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(subprocess, "Popen", begin)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: len(tries) == 3 and process.ready)
    assert cascade.generate(PROMPT, SamplingParams(max_tokens=5)).token_ids


def test_status_tells_of_another_process(cascade: Cascade) -> None:
    """Guards what is known of tiers elsewhere: their passes are counted where they run."""
    assert cascade.lower is not None
    before = cascade.lower.processes[0].status()
    cascade.generate(PROMPT, SamplingParams(max_tokens=20), Speculation(tiers=("tiny",)))
    after = cascade.lower.processes[0].status()
    assert before is not None
    assert after is not None
    assert after.stats.passes > before.stats.passes
    assert [tier.name for tier in cascade.tiers] == ["full"]
    assert cascade.names == ("lookup", "tiny", "medium", "full")


def damaged(folder: Path) -> str:
    """A checkpoint with a tokenizer that lacks a weight."""
    source = Path(small.paths()[0])
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    [weights] = source.glob("*.safetensors")
    tensors = load_file(weights)
    del tensors[next(name for name in tensors if "mlp" in name)]
    save_file(tensors, folder / weights.name, metadata={"format": "pt"})
    return str(folder)


def test_errors_of_a_process_that_loads_come_up(tmp_path: Path) -> None:
    """Guards the message: what is wrong with a drafter's checkpoint is said by the same error, wherever it is loaded."""
    sentences, children = [], psutil.Process().children()
    for processes in (False, True):
        with pytest.raises(ModelError) as caught:
            Cascade.from_pretrained([damaged(tmp_path), small.paths()[1]], device="cpu", processes=processes)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    assert psutil.Process().children() == children


def test_a_process_that_dies_while_it_loads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `from_pretrained` against waiting for ever for a process without memory."""
    children = psutil.Process().children()
    monkeypatch.setattr(tier_process, "COMMAND", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ModelError, match=r"The process of tier tiny ended before it could serve \(signal 9\)"):
        Cascade.from_pretrained(PAIR, device="cpu", processes=True)
    assert psutil.Process().children() == children


def test_where_tiers_live_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the default: processes on a CPU with cores for them, threads on a GPU, for one tier, and on one core."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert pay(2, cpu, Policy())
    assert not pay(1, cpu, Policy())
    assert not pay(3, gpu, Policy())

    class Own(Policy):
        """Of a script that other processes do not read."""

    assert not pay(3, cpu, Own())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not pay(2, cpu, Policy())


SCRIPT = """
import os, signal, sys, threading, time
from cascade import Cascade

def begin(**options):
    return Cascade.from_pretrained({sources!r}, device="cpu", processes=True, **options)

def tell(cascade):
    print(*(process.pid for process in cascade.lower.processes), flush=True)

{end}
"""
ENDS = {
    "killed": "tell(begin()); os.kill(os.getpid(), signal.SIGKILL)",
    "exits": "tell(begin()); sys.exit(3)",
    # a process that was forked has the parent's sockets, too, and lives on
    "forked": """
tell(begin())
pid = os.fork()
if not pid:
    os.close(1)
    os.close(2)
    time.sleep(600)
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
    # while the process of the lower tier imports and loads
    "loading": """
from cascade.processes import lower_tiers
lower_tiers.LowerTiers.wait = lambda self: (print(self.processes[0].pid, flush=True), os.kill(os.getpid(), signal.SIGKILL))
begin()
""",
    # Ctrl-C is a signal for all processes of a terminal, and no end of those of a cascade that goes on
    "interrupted": """
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
cascade = begin()
tell(cascade)
try:
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    while cascade.lower.processes[0].status() is None:  # on a busy machine an answer may come too late
        time.sleep(0.1)
    print("goes on", flush=True)
cascade.close()
""",
}


@pytest.mark.parametrize(
    "end", [rare("forked", id="forked"), "interrupted", rare("killed", id="killed"), rare("exits", id="exits"), "loading"]
)
def test_nobody_outlives_the_parent(end: str) -> None:
    """Guards against processes that are left, from a script without a guard around its main part, however it ends."""
    script = SCRIPT.format(sources=PAIR, end=ENDS[end])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False, start_new_session=True
    )
    assert done.stdout, done.stderr
    first, *more = done.stdout.split("\n")
    pid = int(first)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    if end == "forked":
        os.kill(int(more[0]), signal.SIGKILL)
    if end == "interrupted":
        assert (more[0], done.returncode) == ("goes on", 0), done.stderr


def test_a_gpu_is_not_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards GPUs, whose memory tiers share from one process, against processes that each take it all."""
    monkeypatch.setattr(placement, "find_device", lambda source, device: torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="processes is True and device is cuda:0"):
        Cascade.from_pretrained(PAIR, processes=True)
