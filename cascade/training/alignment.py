"""Drafters learn from answers: a student, its verifier, and a round of training that is judged.

A round trains on the newest and on older answers in turns, so that the student does not forget. Held-out answers judge it: at
each of their positions the student's likeliest token is compared with the verifier's, before and after the round. Weights that
are significantly worse are dropped. Processes of a `group` share the answers of a round, and its steps.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cascade.engine import draft_vocab
from cascade.engine.checkpoint import load, load_trainable
from cascade.engine.model import Model
from cascade.engine.model_config import NEEDED as FAMILY
from cascade.errors import ConfigError
from cascade.training import group
from cascade.training.distillation import Run, Schedule
from cascade.training.reservoir import Sample
from cascade.training.text import Shard, Text, batches, score
from cascade.training.versions import Versions

LEAST = 200  # positions of held-out answers that a judgement needs
SIGMAS = 2.0  # standard deviations from which a difference is significant
LEAST_KEPT = 0.95  # share of the agreement on older answers that must remain
TOKENS = 1024  # tokens of a step, padding included
SHORTEST = 8  # tokens of an answer with its prompt; shorter ones are skipped
ABOUT = "alignment.json"  # file beside new weights with the outcome of their round

# lower rates than for an untrained student, and without Muon, whose steps take minutes on processors without bfloat16
SCHEDULE = Schedule(muon_lr=0.0, adam_lr=4e-4, warmup_steps=5)


class Stopped(Exception):
    """The round ends early: a tenant asked to be forgotten, or the learner shuts down."""


class Student:
    """The model of a lower tier as a student of the tier above. All its weights learn, in float32."""

    tokens = TOKENS  # tokens of a step

    def __init__(self, verifier: str, source: str, layers: Sequence[int] = (), *, device: str | None = None) -> None:
        """``source`` is the path or hub id of the student, ``verifier`` that of the tier above, which keeps ``layers`` or all.

        Raises `ModelError` if one cannot be loaded, `ConfigError` if the student cannot learn.
        """
        network = load(verifier, device=device, layers=layers, draft=True)
        teacher = Model(network, cache_tokens=TOKENS, num_threads=torch.get_num_threads())  # a step needs no more
        student = load_trainable(source, dtype="float32", device=str(teacher.device))
        if student.config.model_type not in FAMILY:
            raise ConfigError(f"{source!r} is a {student.config.model_type}: drafters that learn are {', '.join(FAMILY)}")
        sizes = student.config.vocab_size, teacher.vocab_size
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{source!r} has {sizes[0]} tokens and its verifier {sizes[1]}: it cannot learn from it")
        self._verifier, self._scored = teacher, dict[bytes, Shard]()  # shards by their tokens: each is scored once
        self._run = Run(student.train(), draft_vocab.tokens(student.config, source), SCHEDULE)

    def learn(self, shard: Shard, progress: float) -> None:
        """Take one step on all texts of ``shard``; ``progress`` is the share of the round that has passed."""
        self._run.learn(self._score(shard), range(shard.num_texts), 1, progress)

    def agrees(self, shard: Shard) -> np.ndarray:
        """For each position of the answers, whether the student's likeliest token is the verifier's, bool."""
        return np.concatenate(self._run.agrees(self._score(shard), range(shard.num_texts), 1))

    def write(self, folder: Path) -> None:
        """Write the weights, for `cascade.engine.model.Model.renew`."""
        self._run.write(folder)

    def _score(self, shard: Shard) -> Shard:
        key = shard.tokens.tobytes()
        if key not in self._scored:
            self._scored[key] = score(self._verifier, shard)
        return self._scored[key]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a round."""

    student: str
    share: float  # share of the round's time that has passed
    steps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a round: agreement of drafter and verifier, as shares of positions of held-out answers."""

    student: str
    before: float  # on the newest answers
    after: float
    old_before: float | None  # on older answers, if there are any
    old_after: float | None
    judged: int  # number of positions
    steps: int
    seconds: float
    problem: str = ""  # why the new weights are dropped; "" if they are kept

    def __str__(self) -> str:
        old = "" if self.old_before is None else f", {self.old_before:.3f} to {self.old_after:.3f} on older ones"
        what = f"dropped, {self.problem}" if self.problem else "kept"
        return f"{self.student} agreed on {self.before:.3f} of the newest answers and now on {self.after:.3f}{old}: {what}"


def align(
    name: str,
    student: Student,
    newest: Sequence[Sample],
    older: Sequence[Sample],
    seconds: float,
    *,
    tell: Callable[[Progress], object] = lambda progress: None,
) -> Outcome:
    """Train ``student`` for ``seconds``, and judge it. ``tell`` is called at every step, and may raise `Stopped`.

    In a `group` each process has the same answers and a student of its own; ``tell`` is that of the first one. Raises
    `ConfigError` if there are too few answers to judge by.
    """
    judges = [shards([sample for sample in pool if sample.held_out], student.tokens) for pool in (newest, older)]
    pools = [shards([sample for sample in pool if not sample.held_out], student.tokens) for pool in (newest, older)]
    begin, steps = time.monotonic(), 0

    def tell_share(share: float) -> None:
        stopped = False
        if group.rank() == 0:
            try:
                tell(Progress(name, share, steps))
            except Stopped:
                stopped = True
        if group.of_first(stopped):
            raise Stopped

    before = [_agrees(student, judge, lambda: tell_share(0.0)) for judge in judges]
    if len(before[0]) < LEAST or not pools[0]:
        raise ConfigError(f"{len(before[0])} positions of held-out answers are too few to judge {name} by: {LEAST} are needed")
    start = time.monotonic()
    for shard in _in_turns([group.part(pool) for pool in pools if pool]):
        share = group.of_first((time.monotonic() - start) / seconds)
        if share >= 1:
            break
        tell_share(share)
        student.learn(shard, share)
        steps += 1
    after = [_agrees(student, judge, lambda: tell_share(1.0)) for judge in judges]
    old = [float(judged[1].mean()) if len(judged[1]) else None for judged in (before, after)]
    return Outcome(
        name,
        before=float(before[0].mean()),
        after=float(after[0].mean()),
        old_before=old[0],
        old_after=old[1],
        judged=len(before[0]),
        steps=steps,
        seconds=time.monotonic() - begin,
        problem=_problem(before, after),
    )


@dataclass(frozen=True, slots=True)
class Lesson:
    """A round for a drafter that serves: student, verifier, answers, and the folder for new weights."""

    student: str
    verifier: str  # source of the verifier's weights
    source: str  # the student's source
    layers: Sequence[int]  # layers of the verifier, if the tier consists of some of them; none for all
    newest: Sequence[Sample]
    older: Sequence[Sample]
    seconds: float
    folder: Path  # the folder of `Versions`

    def run(self, device: str | None, tell: Callable[[Progress], object]) -> Outcome:
        """Train, judge, and publish what is no worse; in a `group` the first process publishes.

        Raises the errors of `Student` and `align`, and `Stopped` if ``tell`` does.
        """
        learner = Student(self.verifier, self.source, self.layers, device=device)
        outcome = align(self.student, learner, self.newest, self.older, self.seconds, tell=tell)
        if not outcome.problem and group.rank() == 0:
            versions = Versions(self.folder)
            versions.choose(versions.add(partial(record, learner, outcome)))
        return outcome


def record(student: Student, outcome: Outcome, folder: Path) -> None:
    """Write the weights and the outcome of a round, see `cascade.training.versions.Versions.add`."""
    student.write(folder)
    (folder / ABOUT).write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")


def _problem(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> str:
    """Why new weights are dropped, "" if they are kept: a sign test of the positions that changed (McNemar 1947)."""
    for where, old, new, kept in zip(("the newest", "older"), before, after, (1.0, LEAST_KEPT), strict=True):
        won, lost = int((new & ~old).sum()), int((old & ~new).sum())
        if lost - won > (1 - kept) * int(old.sum()) + SIGMAS * (won + lost) ** 0.5:
            return f"it is significantly worse on {where} answers"
    return ""


def _agrees(student: Student, texts: Sequence[Shard], on_step: Callable[[], object]) -> np.ndarray:
    """`Student.agrees` for all ``texts``; each process of a `group` takes the same number of steps."""
    rows = [np.zeros(0, bool)]
    for first in range(0, len(texts), group.size()):
        on_step()
        rows += [student.agrees(shard) for shard in texts[first : first + group.size()][group.rank() :][:1]]
    return group.together(np.concatenate(rows))


def shards(samples: Sequence[Sample], tokens: int) -> list[Shard]:
    """Answers in batches of similar length, at most ``tokens`` each, padding included; each batch is a shard."""
    texts = [Text([*s.tokens[:-1]], s.prompt_len, s.temperature) for s in samples if len(s.tokens) >= SHORTEST]
    if not texts:
        return []
    rows = batches(Shard.of(texts), range(len(texts)), tokens)
    return [Shard.of([texts[number] for number in numbers]) for numbers in rows]


def _in_turns(pools: Sequence[Sequence[Shard]]) -> Iterator[Shard]:
    """Endlessly yield a shard of each pool in turns; each pool repeats in random order."""
    rng = np.random.default_rng(0)

    def endless(pool: Sequence[Shard]) -> Iterator[Shard]:
        while True:
            yield from (pool[index] for index in rng.permutation(len(pool)))

    for draws in zip(*map(endless, pools), strict=True):
        yield from draws
