"""From a model to a smaller one of the same tokens that drafts for it: text, student, training, export.

A run has five phases, each with a share of the given hours: the teacher writes text and says what it thinks of it, the student
is cut out of the teacher and learns, the student answers prompts itself and the teacher says what it thinks of that, the
student learns from both, and the result is written. All of it lies in a work folder, so that a run goes on where it was
interrupted, and several students of one teacher share its text.
"""

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from cascade.engine import draft_vocab
from cascade.engine.devices import product_dtype
from cascade.engine.loading import find_device, load
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError
from cascade.training.distillation import CAUSAL, Run, distil
from cascade.training.learning import mixed_precision
from cascade.training.student import Shape, cost, cut
from cascade.training.text import SHARD_TOKENS, Shard, batches, held_out, likelihood, padded, score
from cascade.training.writing import Turns, Written, end_tokens, given_prompts, own_prompts, write

log = logging.getLogger(__name__)

WRITING, LEARNING, ANSWERING = 0.35, 0.6, 0.05  # shares of the hours
BEFORE_ANSWERS = 2 / 3  # of the learning
MAX_SHARDS = 400  # 20 M tokens and 4 GB with what the teacher says of them
JUDGED_SHARDS = 4  # whose held-out texts tell the agreement
SHORTEST_ANSWER = 4  # tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What is made, and in how much time. Raises `ConfigError`."""

    cost: float  # share of the teacher's pass
    hours: float = 8.0
    max_len: int = 512  # tokens of a text
    rows: int = 128  # texts written at a time

    def __post_init__(self) -> None:
        if not 0 < self.cost < 1:
            raise ConfigError(
                f"cost is {self.cost:g}: it is the share of the model's pass that the student's takes, such as 0.1"
            )
        if not self.hours > 0:
            raise ConfigError(f"hours is {self.hours:g}: it must be more than 0")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    phase: str
    share: float  # of the run's time that has passed
    tokens: int  # written, or learnt
    agreement: float | None = None  # with the teacher on held-out answers at temperature 0, once it is known


Tell = Callable[[Progress], object]


class Distillation:
    """One run: a teacher, its text in ``work``, a student in ``out``."""

    def __init__(
        self,
        source: str,
        out: Path,
        plan: Plan,
        *,
        work: Path,
        data: Sequence[Path] = (),
        start: Path | None = None,
        device: str | None = None,
    ) -> None:
        self.tokenizer: PreTrainedTokenizerBase = Tokenizer.from_pretrained(source).backend
        dtype = str(product_dtype(find_device(source, device))).removeprefix("torch.")
        self.teacher = load(source, dtype=dtype, device=device).requires_grad_(False).eval()
        self.teacher.set_attn_implementation(CAUSAL)
        self.plan, self._out, self._work, self._data, self._source = plan, out, work, data, source
        self._start = start
        self.shape = Shape.costing(self.teacher.config, plan.cost) if start is None else self._shape_of(start)
        self._texts, self._answers = work / "text", work / out.name
        self._check_work()
        self.turns = Turns.of(self.tokenizer, end_tokens(self.teacher, self.tokenizer))
        self.agreement: dict[float, float] = {}  # by temperature of the text

    def run(self, tell: Tell = lambda progress: None) -> dict[float, float]:
        """Do what is left of it; returns the agreement on held-out answers by temperature of the text."""
        self._write(tell)
        run = self._begin()
        self._learn(run, self._shards(self._texts), BEFORE_ANSWERS, tell)
        self._answer(run, tell)
        self._learn(run, [*self._shards(self._answers), *self._shards(self._texts)], 1.0, tell)
        self.agreement = run.agreement(self._judged(), len(self.turns.opening))
        self._export(run)
        return self.agreement

    # text

    def _write(self, tell: Tell) -> None:
        """Write and score text of the teacher, or score the given one."""
        limit = self.plan.hours * 3600 * WRITING
        shards = len(self._shard_files(self._texts))
        if self._data and not shards:
            texts: Iterator[Written] = self._given()
        elif self._data:
            return
        else:
            texts = self._written(self.teacher, own_prompts(self.turns, skip=shards * 1009), seed=shards)
        self._store(self._texts, texts, "writing", limit, tell)

    def _answer(self, run: Run, tell: Tell) -> None:
        """Let the student answer prompts of the text, and score what it says: there it meets its own mistakes."""
        if not self.turns.answering or self._data:
            return
        prompts = (
            shard.tokens[shard.span(text)][: int(shard.prompts[text])].tolist()
            for shard in itertools.cycle(self._shards(self._texts))
            for text in range(shard.num_texts)
            if not held_out(text)
        )
        limit = self.plan.hours * 3600 * ANSWERING
        whole = run.student.lm_head
        run.student.lm_head = draft_vocab.DraftHead(whole.weight, run.known)
        texts = self._written(run.student.eval(), given_prompts(prompts), seed=run.step)
        self._store(self._answers, texts, "answering", limit, tell)
        run.student.lm_head = whole
        run.student.train().set_attn_implementation(CAUSAL)

    def _written(self, network: PreTrainedModel, beginnings: Iterator[Written], seed: int) -> Iterator[Written]:
        plan = self.plan
        with mixed_precision(network.device):
            yield from write(network, self.turns, beginnings, rows=plan.rows, max_len=plan.max_len, seed=seed)

    def _given(self) -> Iterator[Written]:
        """The texts of files, cut into pieces."""
        for path in self._data:
            try:
                tokens = self.tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
            except (OSError, UnicodeError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from None
            for begin in range(0, len(tokens), self.plan.max_len):
                yield Written(tokens[begin : begin + self.plan.max_len], 1, 0.0)

    def _store(self, folder: Path, texts: Iterator[Written], phase: str, limit: float, tell: Tell) -> None:
        """Score texts and keep them, a file for every some tokens, until time or disk is used up."""
        folder.mkdir(parents=True, exist_ok=True)
        kept, number, total = list[Written](), len(self._shard_files(folder)), 0
        key = phase if folder == self._texts else f"{phase} {self._out.name}"
        begin = time.monotonic() - self._spent().get(key, 0.0)
        for text in texts:
            if len(text.tokens) - text.prompt_len >= SHORTEST_ANSWER:
                kept.append(text)
                total += len(text.tokens)
            seconds = time.monotonic() - begin
            over = seconds >= limit or number >= MAX_SHARDS
            if sum(len(one.tokens) for one in kept) >= SHARD_TOKENS or (over and number == 0 and kept):
                self._keep(folder / f"{number:05d}.npz", kept)
                number, kept = number + 1, []
                self._spend(key, time.monotonic() - begin)
            before = 0.0 if phase == "writing" else WRITING + LEARNING * BEFORE_ANSWERS
            tell(Progress(phase, min(1.0, before + seconds / (self.plan.hours * 3600)), total))
            if over:
                break
        else:
            if kept:
                self._keep(folder / f"{number:05d}.npz", kept)
        self._spend(key, time.monotonic() - begin)

    def _keep(self, path: Path, texts: Sequence[Written]) -> None:
        shard = Shard.of([t.tokens for t in texts], [t.prompt_len for t in texts], [t.temperature for t in texts])
        implementation = self.teacher.config._attn_implementation
        self.teacher.set_attn_implementation(CAUSAL)
        score(self.teacher, shard).save(path)
        self.teacher.set_attn_implementation(implementation)

    @staticmethod
    def _shard_files(folder: Path) -> list[Path]:
        return sorted(folder.glob("*.npz"))

    def _shards(self, folder: Path) -> list[Shard]:
        return [Shard.load(path) for path in self._shard_files(folder)]

    def _judged(self) -> list[Shard]:
        return [Shard.load(path) for path in self._shard_files(self._texts)[:JUDGED_SHARDS]]

    # student

    def _begin(self) -> Run:
        shards = self._judged()
        if not shards or not any(not held_out(text) for text in range(shards[0].num_texts)):
            raise ConfigError(f"hours is {self.plan.hours:g}: no text was written in the time, give more")
        if self._start is not None:
            student = LlamaForCausalLM.from_pretrained(self._start, dtype=torch.float32).to(self.teacher.device)
        else:
            texts = next(batches(shards[0], range(shards[0].num_texts), 16_384))
            self.teacher.set_attn_implementation(CAUSAL)
            student = cut(self.teacher, self.shape, padded(shards[0], texts).to(self.teacher.device))
        said = self._said() if self.shape.vocab_size < student.config.vocab_size else None
        if said is not None:
            student.config.draft_vocab_size = len(said)
        run = Run(student.train(), said)
        if self._checkpoint.exists():
            run.resume(self._checkpoint)
        return run

    def _shape_of(self, start: Path) -> Shape:
        """The shape of an earlier student; which layers it began as is not known any more."""
        config = AutoConfig.from_pretrained(start)
        if config.model_type != "llama" or config.vocab_size != self.teacher.config.vocab_size:
            raise ConfigError(
                f"start is {str(start)!r}, a {config.model_type} of {config.vocab_size} tokens: "
                f"give a student of {self._source!r}, a llama of {self.teacher.config.vocab_size}"
            )
        said = getattr(config, "draft_vocab_size", None) or config.vocab_size
        return Shape(config.hidden_size, config.intermediate_size, tuple(range(config.num_hidden_layers)), said)

    def _said(self) -> Tensor:
        """The tokens that the student says: chosen once, by how often the teacher says them."""
        path = self._work / f"{self._out.name}.{draft_vocab.FILE}"
        if self._start is not None:
            path = self._start / draft_vocab.FILE
        elif not path.exists():
            often = likelihood(self._shards(self._texts), self.teacher.config.vocab_size)
            often[[*self.turns.ends]] = np.inf
            chosen = np.sort(np.argsort(-often, kind="stable")[: self.shape.vocab_size])
            path.write_text(json.dumps(chosen.tolist()), encoding="utf-8")
        return torch.tensor(json.loads(path.read_text(encoding="utf-8")))

    def _learn(self, run: Run, shards: Sequence[Shard], share: float, tell: Tell) -> None:
        """Learn until that share of the time for it has passed."""
        whole = self.plan.hours * 3600 * LEARNING
        judged, opening, last = self._judged(), len(self.turns.opening), run.seconds

        def heard(now: Run) -> None:
            nonlocal last
            if now.seconds - last > max(60.0, whole / 20):  # judging takes seconds
                self.agreement, last = now.agreement(judged, opening), now.seconds
            passed = WRITING + LEARNING * now.seconds / whole + (ANSWERING if share == 1.0 else 0.0)
            tell(Progress("learning", min(1.0, passed), now.tokens, self.agreement.get(0.0)))

        distil(run, shards, opening, whole * share, self._checkpoint, whole=whole, tell=heard)

    @property
    def _checkpoint(self) -> Path:
        return self._work / f"{self._out.name}.pt"

    def _export(self, run: Run) -> None:
        """An ordinary folder of Transformers, in bfloat16, with a model card."""
        partial = self._out.with_name(self._out.name + ".partial")
        run.student.generation_config = GenerationConfig.from_dict(self.teacher.generation_config.to_dict())
        run.write(partial)
        self.tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(self._card(run), encoding="utf-8")
        for file in partial.iterdir():
            self._out.mkdir(parents=True, exist_ok=True)
            os.replace(file, self._out / file.name)
        partial.rmdir()

    def _card(self, run: Run) -> str:
        shape, config = self.shape, run.student.config
        written = sum(len(shard.tokens) for shard in self._shards(self._texts))
        figures = "\n".join(f"| {temperature:g} | {share:.3f} |" for temperature, share in self.agreement.items())
        name = getattr(self.teacher.config, "_name_or_path", None) or self._source
        return f"""# A draft model for {Path(name).name}

Made by `cascade distill` to guess what {Path(name).name} says. It is no assistant of its own.

| | |
|---|---|
| parameters | {run.student.num_parameters():,} |
| share of the teacher's weights that a pass reads | {cost(self.teacher.config, shape):.3f} |
| tokens that it says | {shape.vocab_size:,} of {config.vocab_size:,} |
| width, neurons, layers | {config.hidden_size}, {config.intermediate_size}, {config.num_hidden_layers} |
| it began as | {"an earlier student" if self._start else f"layers {', '.join(map(str, shape.layers))} of the teacher"} |
| text | {written:,} tokens {"of the given files" if self._data else "that the teacher wrote itself"} |
| tokens learnt, repetitions included | {run.tokens:,} |
| steps, hours of training | {run.step:,}, {run.seconds / 3600:.2f} |

Share of positions of held-out answers at which both say the same, by the temperature at which the teacher wrote them:

| temperature | agreement |
|---|---|
{figures}
"""

    # bookkeeping

    def _check_work(self) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        about = {"model": self._source, "vocab_size": self.teacher.config.vocab_size, "max_len": self.plan.max_len}
        path = self._work / "teacher.json"
        if path.exists() and (found := json.loads(path.read_text(encoding="utf-8"))) != about:
            raise ConfigError(
                f"{self._work} is the work of {found['model']!r}: choose another folder with --work, or remove it"
            )
        path.write_text(json.dumps(about), encoding="utf-8")

    def _spent(self) -> dict[str, float]:
        """Seconds by phase, and by student where it is a phase of one."""
        path = self._work / "spent.json"
        found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def _spend(self, key: str, seconds: float) -> None:
        partial = self._work / "spent.partial"
        partial.write_text(json.dumps({**self._spent(), key: seconds}), encoding="utf-8")
        os.replace(partial, self._work / "spent.json")
