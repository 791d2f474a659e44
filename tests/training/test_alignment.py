"""Drafters that learn from answers: what is kept, who is forgotten, what is published, what a server and a group do."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cryptography.fernet import Fernet
from torch import Tensor, nn

from cascade.engine import draft_vocab
from cascade.engine.model import Model
from cascade.errors import ConfigError, ModelError
from cascade.params import SamplingParams
from cascade.scorer import Row
from cascade.training import alignment, reservoir
from cascade.training.alignment import Lesson, Outcome, Progress, Stopped, Student, align, record, shards
from cascade.training.distillation import Learner, Schedule
from cascade.training.reservoir import ROWS, SEALED, Reservoir, Sample
from cascade.training.text import Shard
from cascade.training.versions import KEPT, Versions
from tests import small
from tests.cli import run
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = {"rows": 32, "row_tokens": 48, "max_age_s": 86_400.0}


def sample(number: int, tenant: str = "alice", corrected: int = 1, length: int = 40, age_s: float = 0.0) -> Sample:
    tokens = tuple(np.random.default_rng(number).integers(10, 400, length).tolist())
    return Sample(tokens, 8, 0.0, tenant, corrected, time.time() - age_s)


def test_a_reservoir_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    """Guards memory: rows, tokens of a row and age have limits, and the newest answers are never what goes."""
    answers, given = Reservoir(tmp_path, **LIMITS), [sample(n, corrected=99 * (n % 2), length=100) for n in range(1000)]
    answers.add([sample(999, age_s=LIMITS["max_age_s"] + 1)])
    answers.add(given)
    assert len(answers) == LIMITS["rows"]
    assert [answer.tokens for answer in answers.newest] == [answer.tokens[-48:] for answer in given[-16:]]
    assert all(len(answer.tokens) == 48 and answer.prompt_len == 1 for answer in (*answers.newest, *answers.older))
    assert sum(answer.corrected > 0 for answer in answers.older) > 0.85 * len(answers.older)


def test_a_tenant_is_forgotten_in_memory_and_on_disk(tmp_path: Path) -> None:
    """Guards requests to forget: rows of then go everywhere, also those that come late, and those of later stay."""
    answers = Reservoir(tmp_path)
    mine, others = [sample(number) for number in range(5)], [sample(number, "bob") for number in range(5, 10)]
    answers.add([*mine, *others])
    answers.save()
    before = (tmp_path / ROWS).stat().st_size
    reservoir.forget(tmp_path, "alice")
    assert answers.forget()
    answers.add(mine)  # a router had them still
    assert not answers.forget()
    for stored in (answers, Reservoir(tmp_path)):
        assert [answer.tenant for answer in stored.newest] == ["bob"] * 5
    assert (tmp_path / ROWS).stat().st_size < before
    answers.add([sample(11)])
    assert answers.newest[-1].tenant == "alice"


def test_answers_are_on_disk_as_told(tmp_path: Path) -> None:
    """Guards privacy: nobody else reads a file, an encrypted one is read with its key alone, and it is there if told so."""
    plain = Reservoir(tmp_path)
    plain.add([sample(1)])
    plain.save()
    assert (tmp_path / ROWS).stat().st_mode & 0o777 == 0o600
    key = Fernet.generate_key().decode()
    Reservoir(tmp_path, key).save()
    assert [path.name for path in tmp_path.iterdir()] == [SEALED]
    assert Reservoir(tmp_path, key).newest == plain.newest
    for wrong in (None, Fernet.generate_key().decode(), "no key"):
        with pytest.raises(ConfigError, match=r"encrypted|cannot be read|not a Fernet key"):
            Reservoir(tmp_path, wrong)
    answers = Reservoir(tmp_path, on_disk=False)
    assert not len(answers)
    answers.add([sample(2)])
    answers.save()
    assert not [path.name for path in tmp_path.iterdir()]


def test_a_killed_writer_leaves_a_whole_version(tmp_path: Path) -> None:
    """Guards a crash at any moment: what is current is whole, old or new, and the next writer goes on."""
    program = """
import sys; from pathlib import Path; from cascade.training.versions import Versions
versions = Versions(Path(sys.argv[1]))
def write(folder):
    for part in ("a", "b"):
        (folder / part).write_bytes(b"x" * 2**20)
while True:
    versions.choose(versions.add(write))
"""
    versions = Versions(tmp_path)
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as writer:
            wait_until(lambda before=versions.current: versions.current != before)
            writer.kill()  # in the middle of the next one
        current = versions.current
        assert [(current / part).stat().st_size for part in ("a", "b")] == [2**20, 2**20]
        assert len(versions.all) <= KEPT + 1  # one may wait for its turn


def test_rollback_goes_back_one_by_one(tmp_path: Path) -> None:
    """Guards `cascade rollback`: to the version before, at last to what the drafter began with; new ones get new numbers."""
    versions = Versions(tmp_path)
    for number in range(3):
        versions.choose(versions.add(lambda folder, number=number: (folder / "x").write_text(str(number)) and None))
    assert [path.name if path else None for path in (versions.rollback(), versions.rollback())] == ["000002", "000001"]
    assert versions.rollback() is None
    assert versions.current is None
    assert versions.add(lambda folder: None).name == "000004"


class Talker:
    """A student that says what it is told before and after it has learnt."""

    tokens = 512

    def __init__(self, before: float, after: float, old_after: float | None = None) -> None:
        self._shares, self._learnt = (before, after, old_after), 0

    def learn(self, shard: Shard, progress: float) -> None:
        self._learnt += 1
        time.sleep(0.001)

    def agrees(self, shard: Shard) -> np.ndarray:
        before, after, old = self._shares
        share = before if not self._learnt else old if old is not None and shard.temperatures[0] else after
        length = len(shard.tokens)
        return np.arange(length) < share * length

    def write(self, folder: Path) -> None: ...


@pytest.mark.parametrize(
    ("student", "problem"),
    [
        (Talker(0.5, 0.7), ""),
        (Talker(0.5, 0.5), ""),
        (Talker(0.5, 0.4), "worse on the newest"),
        (Talker(0.5, 0.7, 0.3), "worse on older"),
        (Talker(0.5, 0.7, 0.485), ""),
    ],
    ids=["better", "same", "worse", "forgetful", "hardly forgetful"],
)
def test_worse_weights_are_dropped(student: Talker, problem: str) -> None:
    """Guards servers against weights that agree less, on what is asked now or on what was asked before."""
    newest = [sample(number, length=60) for number in range(200)]
    older = [Sample(answer.tokens[::-1], 8, 1.0, "", 0, answer.time) for answer in newest]
    outcome = align("tiny", student, newest, older, 0.02)
    assert problem in outcome.problem
    assert bool(problem) == bool(outcome.problem)
    assert outcome.judged >= alignment.LEAST
    with pytest.raises(ConfigError, match="too few to judge tiny by"):
        align("tiny", student, newest[:9], [], 0.02)


@pytest.fixture(scope="module")
def answers() -> list[Sample]:
    """What the small full model writes after the beginnings of lines."""
    prompts = [f"class Reader{number}:\n    def read(self, name{number}):\n" for number in range(16)]
    with small.cascade() as cascade:
        written = cascade.generate(prompts, SamplingParams(max_tokens=56, temperature=0, ignore_eos=True))
        ids_of = [cascade.tokenizer.encode(prompt) for prompt in prompts]
    return [
        Sample((*ids, *done.token_ids), len(ids), 0.0, "", 1, time.time()) for ids, done in zip(ids_of, written, strict=True)
    ]


def score_of(model: Model, text: tuple[int, ...]) -> list[int]:
    cache = model.new_cache()
    try:
        return list(model.run([Row(cache, 0, text, len(text) - 1, SamplingParams(temperature=0, seed=0))])[0].own)
    finally:
        cache.free()


def test_a_student_learns_and_its_weights_are_taken(tmp_path: Path, answers: list[Sample]) -> None:
    """Guards the whole way: answers of the full model teach a drafter, which a model that runs takes without a new one."""
    source, _, full = small.paths()
    student = Student(full, source, device="cpu")
    pool, reports = shards(answers, student.tokens), list[Progress]()
    before = np.concatenate([student.agrees(shard) for shard in pool])
    for step in range(12):
        student.learn(pool[step % len(pool)], step / 12)
    assert np.concatenate([student.agrees(shard) for shard in pool]).mean() > before.mean()
    many = [answer.tail(len(answer.tokens) - cut) for answer in answers for cut in range(4)]  # of which some are held out
    outcome = align("tiny", student, many, [], 0.01, tell=reports.append)
    assert reports[-1].steps == outcome.steps
    version = Versions(tmp_path).add(partial(record, student, outcome))
    model = Model.from_pretrained(source, dtype="float32", device="cpu")
    fresh = Model.from_pretrained(str(version), dtype="float32", device="cpu")
    text = answers[0].tokens
    own = score_of(model, text)
    model.renew(str(version))
    assert score_of(model, text) == score_of(fresh, text)
    assert score_of(model, text) != own


def test_a_student_learns_what_its_verifier_says(tmp_path: Path, answers: list[Sample]) -> None:
    """Guards drafts for a drafter: a verifier says only its draft vocabulary, or what its layers say."""
    source, folder = small.paths()[0], tmp_path / "verifier"
    shutil.copytree(source, folder)
    ids = torch.arange(0, small.VOCAB, 2)
    draft_vocab.write(ids, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(ids)}))
    pool = shards(answers, 512)
    assert sum(len(shard.tokens) for shard in pool) == sum(len(answer.tokens) - 1 for answer in answers)
    verifiers: list[tuple[Any, ...]] = [(source, source), (str(folder), source), (source, source, (0, 2))]
    students = [Student(*sources, device="cpu") for sources in verifiers]
    same, said, cut = (np.concatenate([student.agrees(shard) for shard in pool]) for student in students)
    assert same.mean() > 0.95  # its verifier has the same weights
    assert 0.2 < said.mean() < 0.8
    assert cut.mean() < 0.95  # it was taken for the whole model


def test_passes_go_on_while_weights_are_renewed() -> None:
    """Guards the heap: a loader that changes PyTorch's default dtype gave a pass half the memory that it writes to."""
    tiny, medium, _ = small.paths()
    model, text = Model.from_pretrained(tiny, dtype="float32", device="cpu", num_threads=1), tuple(range(30, 60))
    expected, scores, over = score_of(model, text), list[list[int]](), threading.Event()

    def work() -> None:
        while not over.is_set():
            scores.append(score_of(model, text))

    passes = threading.Thread(target=work)
    passes.start()
    try:
        for _ in range(8):
            model.renew(tiny)
    finally:
        over.set()
        passes.join()
    with pytest.raises(ModelError, match="cannot replace others"):
        model.renew(medium)
    assert len(scores) > 8
    assert all(own == expected for own in (*scores, score_of(model, text)))


def kept(folder: Path, count: int) -> Reservoir:
    answers = Reservoir(folder)
    answers.add(sample(number, ("alice", "bob")[number % 2], length=32) for number in range(count))
    answers.save()
    return answers


def test_a_round_without_a_server(tmp_path: Path, small_demo: None) -> None:
    """Guards the command: it says what came of the round, and weights that are kept are the latest."""
    kept(tmp_path, 200)
    code, output = run("align", "--folder", tmp_path, "--tier", "tiny", "--seconds", "0.5", "--device", "cpu")
    assert code == 0, output
    assert "tiny agreed on" in output
    current = Versions(tmp_path / "tiny").current
    assert (current is not None) == ("Its latest weights" in output.replace("\n", " "))
    if current is not None:
        assert {"config.json", "model.safetensors", "alignment.json"} <= {file.name for file in current.iterdir()}


def test_what_cannot_be_taught_is_one_sentence(tmp_path: Path, small_demo: None) -> None:
    """Guards operators against tracebacks: no answers, too few, a tier that is not there, nothing to go back to."""
    for arguments, words in (
        (("align", "--folder", tmp_path, "--tier", "tiny"), "There are no answers"),
        (("align", "--folder", tmp_path, "--tier", "other"), "it takes tiny"),
        (("rollback", "tiny", "--folder", tmp_path), "never learned there"),
    ):
        code, output = run(*arguments)
        assert (code, words in " ".join(output.split())) == (1, True), output
    kept(tmp_path, 8)
    assert "too few" in run("align", "--folder", tmp_path, "--tier", "tiny", "--seconds", "0.1", "--device", "cpu")[1]


def test_a_tenant_is_forgotten_without_a_server(tmp_path: Path) -> None:
    """Guards the disk: answers of one tenant are gone when the command returns, those of others stay."""
    kept(tmp_path, 20)
    assert run("forget", "alice", "--folder", tmp_path)[0] == 0
    assert [answer.tenant for answer in Reservoir(tmp_path).newest] == ["bob"] * 10


SIZE = 2  # processes that train together


def steps(rank: int, size: int) -> Tensor:
    """The weights of a linear module after three steps on the rows of this process."""
    torch.manual_seed(rank)  # it is the first one's weights that count
    module = nn.Linear(6, 4)
    learner = Learner(module, Schedule(muon_lr=0.0, adam_lr=0.1, warmup_steps=1), 0)
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(9))[rank::size]
    for step in range(3):
        learner.learn((module(rows) ** 2).mean(), step, 0.0)
    return module.weight.detach()


def lesson(folder: Path) -> Lesson:
    answers = [sample(number, length=48) for number in range(96)]
    tiny, _, full = small.paths()
    return Lesson("tiny", full, tiny, (), answers, [], seconds=0.5, folder=folder)


def stopping(progress: Progress) -> None:
    if progress.steps == 2:
        raise Stopped


def joined(rank: int, folder: Path, work: Callable[[int, Path], Any]) -> Any:
    """What ``work`` finds in a process of the group."""
    torch.set_num_threads(1)
    bound = timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=SIZE, timeout=bound)
    try:
        return work(rank, folder)
    finally:
        dist.destroy_process_group()


def in_group(folder: Path, work: Callable[[int, Path], Any]) -> list[Any]:
    """What each process of a group finds: this one, and another one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as others:
        other = others.submit(joined, 1, folder, work)
        return [joined(0, folder, work), other.result()]


def three_steps(rank: int, folder: Path) -> Tensor:
    return steps(rank, SIZE)


def round_and_stop(rank: int, folder: Path) -> tuple[Outcome, bool]:
    """The outcome of a round, and whether another one stopped when the first process did."""
    outcome = lesson(folder / "tiny").run("cpu", lambda progress: None)
    try:
        replace(lesson(folder / "stopped"), seconds=60.0).run("cpu", stopping if rank == 0 else lambda progress: None)
    except Stopped:
        return outcome, True
    return outcome, False


def test_a_step_is_that_of_one_process_on_all_texts(tmp_path: Path) -> None:
    """Guards what is learnt: processes that begin apart, or keep gradients to themselves, drift away from each other."""
    first, second = in_group(tmp_path, three_steps)
    assert torch.equal(first, second)
    assert torch.allclose(first, steps(0, 1), atol=1e-6)


@pytest.mark.slow
def test_all_judge_alike_one_publishes_and_all_stop_when_the_first_is_told_to(tmp_path: Path) -> None:
    """Guards answers that are judged twice or by nobody, two versions of one round, and a process that waits for ever."""
    (first, *stopped), (second, *others) = in_group(tmp_path, round_and_stop)
    alone = lesson(tmp_path / "alone").run("cpu", lambda progress: None)
    assert (first.before, first.after, first.problem) == (second.before, second.after, second.problem)
    assert first.steps == second.steps > 0
    assert first.judged == alone.judged
    assert first.before == pytest.approx(alone.before)
    assert len(Versions(tmp_path / "tiny").all) == (not first.problem)
    assert (stopped, others) == ([True], [True])
    assert not (tmp_path / "stopped").exists()
