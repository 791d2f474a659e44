"""Drafters learn from what was answered: a student, its verifier, a round of training, and who judges it.

A round trains on the newest answers and, in turns with them, on older ones, so that what it learns does not cost what it knew.
Answers that are held out judge it: at each of their positions the verifier's likeliest token is known, and whether the drafter
said it before and says it after. What is worse by more than chance is dropped. The text is the verifier's own in any case.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from cascade.engine import draft_vocab
from cascade.engine.checkpoint import SINGLE
from cascade.engine.heads.checkpoint import read
from cascade.engine.heads.eagle import Eagle3
from cascade.engine.heads.loading import published
from cascade.engine.loading import load
from cascade.engine.network.llama import FAMILY
from cascade.errors import ConfigError
from cascade.training import eagle
from cascade.training.distillation import CAUSAL, Run, Schedule
from cascade.training.learning import Learner, mixed_precision
from cascade.training.reservoir import Sample
from cascade.training.text import Shard, batches, padded, score

HEAD = "eagle3"  # the kind of head that learns
LEAST = 200  # positions of held-out answers below which nothing is judged, and so nothing learnt
SIGMAS = 2.0  # of a difference that is not chance
LEAST_KEPT = 0.95  # share of what was right on older answers that has to stay right
TOKENS, HEAD_TOKENS = 1024, 512  # of a step, padding included
CONTEXT = 128  # tokens of a row that a head learns from
SHORTEST = 8  # tokens of an answer with its prompt
ABOUT = "alignment.json"  # beside new weights: how they came to be

# gentler than for a student that knows nothing yet; Muon takes far longer for a step, on processors without bfloat16 minutes
RATES: Mapping[str, Any] = {"muon_lr": 0.0, "adam_lr": 4e-4, "weight_decay": 0.0, "warmup_steps": 5}


class Stopped(Exception):
    """The round is given up: what it learns from is to be forgotten, or the learner ends."""


class Student(Protocol):
    """A drafter in training."""

    tokens: int  # of a step

    def learn(self, shard: Shard, progress: float) -> None:
        """One step on all texts of ``shard``; ``progress`` is the share of the round that has passed."""

    def says(self, shard: Shard) -> np.ndarray:
        """Bool, by position of the answers: whether it says what its verifier says."""

    def write(self, folder: Path) -> None:
        """Its weights, for `cascade.engine.model.Model.renew`."""


class TierStudent:
    """The model of a lower tier, as a student of the tier above: all of its weights learn."""

    tokens = TOKENS

    def __init__(self, verifier: PreTrainedModel, source: str) -> None:
        """Raises `ModelError` if it cannot be loaded, `ConfigError` if it cannot learn."""
        student = load(source, dtype="float32", device=str(verifier.device))
        if type(student) not in FAMILY:
            known = ", ".join(kind.__name__.removesuffix("ForCausalLM") for kind in FAMILY)
            raise ConfigError(f"{source!r} is a {type(student).__name__}: drafters that learn are {known}")
        sizes = [network.config.get_text_config().vocab_size for network in (student, verifier)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"{source!r} has {sizes[0]} tokens and its verifier {sizes[1]}: it cannot learn from that")
        verifier.set_attn_implementation(CAUSAL)
        self._verifier, self._scored = verifier, dict[bytes, Shard]()
        self._run = Run(student.train(), draft_vocab.said(student.config, source), Schedule(**RATES))

    def learn(self, shard: Shard, progress: float) -> None:
        self._run.learn(self._score(shard), range(shard.num_texts), 1, progress)

    def says(self, shard: Shard) -> np.ndarray:
        return np.concatenate(self._run.says(self._score(shard), range(shard.num_texts), 1))

    def write(self, folder: Path) -> None:
        self._run.write(folder)

    def _score(self, shard: Shard) -> Shard:
        """With what the verifier says, which is asked once."""
        key = shard.tokens.tobytes()
        if key not in self._scored:
            self._scored[key] = score(self._verifier, shard)
        return self._scored[key]


class HeadStudent:
    """An EAGLE-3 head, as a student of the model that it reads."""

    tokens = HEAD_TOKENS

    def __init__(self, verifier: PreTrainedModel, source: str) -> None:
        """Raises `ModelError` if it cannot be loaded, `ConfigError` if it is of another kind."""
        self._checkpoint = read(source)
        head = published(self._checkpoint, verifier)
        if not isinstance(head, Eagle3) or head.kind != HEAD:
            raise ConfigError(f"{source!r} is a head of kind {head.kind!r}: of heads those of kind {HEAD!r} learn")
        self._verifier, self._head = verifier, head.float().requires_grad_(True)
        self._schedule = eagle.Schedule(steps=0, **RATES)
        self._learner, self._steps = Learner(head, self._schedule, {head.vocab_size, len(head.known)}), 0

    def learn(self, shard: Shard, progress: float) -> None:
        rows = max(1, len(shard.tokens) // CONTEXT)
        ids = torch.from_numpy(shard.tokens[: rows * CONTEXT].astype(np.int64)).view(rows, -1).to(self._verifier.device)
        if ids.shape[1] > self._schedule.unrolled + 1:
            self._learner.learn(eagle.loss(self._verifier, self._head, ids, self._schedule), self._steps, progress)
            self._steps += 1

    @torch.no_grad()
    def says(self, shard: Shard) -> np.ndarray:
        ids, steps = padded(shard, range(shard.num_texts)).to(self._verifier.device), self._schedule.unrolled
        if ids.shape[1] <= steps:
            return np.zeros(0, bool)
        known = torch.tensor(self._head.known, device=ids.device)
        with mixed_precision(ids.device):
            said = self._verifier(ids, output_hidden_states=True, use_cache=False)
            best, n = said.logits.argmax(-1)[:, 1:], ids.shape[1] - steps
            right = [
                known[logits.argmax(-1)].view(len(ids), n) == best[:, step : step + n]
                for step, logits in enumerate(eagle.unroll(self._head, said.hidden_states, ids, steps))
            ]
        found = torch.stack(right, -1).cpu().numpy()
        ends = zip(found, shard.prompts, np.diff(shard.starts), strict=True)
        return np.concatenate([row[max(0, begin - 2) : max(0, end - 2 - steps)].reshape(-1) for row, begin, end in ends])

    def write(self, folder: Path) -> None:
        weights = dict(self._checkpoint.named(self._head.names).weights)
        weights |= {name: part.detach().bfloat16().contiguous() for name, part in self._head.state_dict().items()}
        save_file(weights, folder / SINGLE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self._checkpoint.config, indent=2) + "\n", encoding="utf-8")


def student_of(name: str, verifier: str, source: str, *, device: str | None = None) -> Student:
    """The drafter of that name, a tier's or the kind of a head, whose weights and whose verifier's are there; see `Student`."""
    network = load(verifier, device=device).requires_grad_(False).eval()
    return HeadStudent(network, source) if name == HEAD else TierStudent(network, source)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a round is."""

    student: str
    share: float  # of its time
    steps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a round: the share of positions of held-out answers at which the drafter said what its verifier says."""

    student: str
    before: float  # on the newest answers
    after: float
    old_before: float | None  # on older ones, if there are any
    old_after: float | None
    judged: int  # positions
    steps: int
    seconds: float
    problem: str = ""  # why its weights are dropped

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
    """A round: train ``student`` for a time, and judge it. ``tell`` hears of every step, and may raise `Stopped`.

    Raises `ConfigError` if there are too few answers to judge by.
    """
    judges = [shards([one for one in pool if one.held_out], student.tokens) for pool in (newest, older)]
    pools = [shards([one for one in pool if not one.held_out], student.tokens) for pool in (newest, older)]
    begin = time.monotonic()
    before = [_said(student, judge, lambda: tell(Progress(name, 0.0, 0))) for judge in judges]
    if len(before[0]) < LEAST or not pools[0]:
        raise ConfigError(f"{len(before[0])} positions of held-out answers are too few to judge {name} by: {LEAST} are needed")
    steps = 0
    start = time.monotonic()
    for shard in _in_turns([pool for pool in pools if pool]):
        share = (time.monotonic() - start) / seconds
        if share >= 1:
            break
        tell(Progress(name, share, steps))
        student.learn(shard, share)
        steps += 1
    after = [_said(student, judge, lambda: tell(Progress(name, 1.0, steps))) for judge in judges]
    old = [float(found[1].mean()) if len(found[1]) else None for found in (before, after)]
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


def record(student: Student, outcome: Outcome) -> Callable[[Path], None]:
    """What writes the weights of a round into a folder, and how they came to be; for `cascade.training.versions.Versions`."""

    def write(folder: Path) -> None:
        student.write(folder)
        (folder / ABOUT).write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")

    return write


def _problem(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> str:
    """Why new weights are dropped; "" if they are not: a sign test of the positions that changed (McNemar 1947)."""
    for where, old, new, kept in zip(("the newest", "older"), before, after, (1.0, LEAST_KEPT), strict=True):
        won, lost = int((new & ~old).sum()), int((old & ~new).sum())
        if lost - won > (1 - kept) * int(old.sum()) + SIGMAS * (won + lost) ** 0.5:
            return f"it is worse on {where} answers by more than chance"
    return ""


def _said(student: Student, texts: Sequence[Shard], heard: Callable[[], object]) -> np.ndarray:
    found = [np.zeros(0, bool)]
    for shard in texts:
        heard()
        found.append(student.says(shard))
    return np.concatenate(found)


def shards(samples: Sequence[Sample], tokens: int) -> list[Shard]:
    """Batches of answers of like lengths, each a shard."""
    samples = [sample for sample in samples if len(sample.tokens) >= SHORTEST]
    if not samples:
        return []
    whole = _shard(samples)
    return [_shard([samples[number] for number in numbers]) for numbers in batches(whole, range(len(samples)), tokens)]


def _shard(samples: Sequence[Sample]) -> Shard:
    return Shard.of(
        [sample.tokens for sample in samples],
        [sample.prompt_len for sample in samples],
        [sample.temperature for sample in samples],
    )


def _in_turns(pools: Sequence[Sequence[Shard]]) -> Iterator[Shard]:
    """One of each pool in turns, without end: a pool in random order, again and again."""
    chance = np.random.default_rng(0)

    def endless(pool: Sequence[Shard]) -> Iterator[Shard]:
        while True:
            yield from (pool[index] for index in chance.permutation(len(pool)))

    for draws in zip(*map(endless, pools), strict=True):
        yield from draws
