"""Makes a draft model: a smaller model with the tokenizer of its teacher, trained to predict the teacher's tokens.

Each phase has a share of the given hours. The teacher writes text, and its distribution at each position is kept. The student
is cut out of the teacher and learns these distributions. Then the student itself answers prompts of the text, the teacher's
distributions along these answers are kept, and it learns from both, so that it sees its own mistakes. At last it is exported.
Text and checkpoints are in a work folder, so an interrupted run can continue, and students of one teacher can share its text.
"""

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from cascade.engine import draft_vocab
from cascade.engine.checkpoint import Network, find_device, load_trainable, network_of
from cascade.engine.devices import product_dtype
from cascade.engine.generation import GENERATION_CONFIG, configured_ends, read_json
from cascade.engine.model import Model
from cascade.engine.model_config import context_len, read_config
from cascade.engine.tokenizer import pretrained
from cascade.engine.weights import unread
from cascade.errors import ConfigError
from cascade.prompts import read_prompts
from cascade.training.distillation import Run, Schedule, distil
from cascade.training.student import Shape, cut
from cascade.training.text import HELD_OUT, SHARD_TOKENS, Shard, Text, batches, likelihood, padded, read, score
from cascade.training.versions import replacing
from cascade.training.writing import Turns, given_prompts, own_prompts, write

WRITING, LEARNING, ANSWERING = 0.35, 0.6, 0.05  # shares of the hours
BEFORE_ANSWERS = 2 / 3  # share of the learning that comes before the student's own answers
MAX_SHARDS = 400  # 20 M tokens; 4 GB with the teacher's distributions
JUDGED_SHARDS = 4  # shards whose held-out texts measure the agreement
SHORTEST_ANSWER = 4  # tokens
# for students that are already trained, or are layers of their teacher: larger steps, and Muon, made them worse (docs/log.md)
TRAINED_ON = Schedule(adam_lr=1e-4, muon_lr=0.0, tokens=1024, warmup_steps=10, decay_share=0.6)
FORM = 2  # version of the format of work folders
SPENT = "spent.json"  # seconds spent on writing into each subfolder of the work folder


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make, and in how much time. Raises `ConfigError`."""

    # one of these: the student's pass as a share of the teacher's; layers of the teacher to keep, at full width and with all
    # tokens; or an earlier student to continue with
    cost: float | None = None
    layers: tuple[int, ...] = ()
    start: Path | None = None
    hours: float = 8.0
    max_len: int = 512  # tokens of a text
    rows: int = 128  # texts that are written at the same time
    data: tuple[Path, ...] = ()  # files of text to learn from, in place of the teacher's own
    prompts: Path | None = None  # a file of prompts for the teacher, in place of its own

    def __post_init__(self) -> None:
        if [self.cost is not None, bool(self.layers), self.start is not None].count(True) != 1:
            raise ConfigError(
                "give one of cost, the share of the model's pass, layers, which the draft model is made of, and start, an "
                "earlier draft model"
            )
        if self.data and self.prompts is not None:
            raise ConfigError("give either data, text to learn from, or prompts, which the model is to answer")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    phase: str
    share: float  # share of the run's time that has passed
    tokens: int  # tokens written, or learned from
    agreement: float | None = None  # with the teacher on held-out answers at the lowest temperature; None if not known yet


Tell = Callable[[Progress], object]


class Distillation:
    """One run: a teacher, its text in ``work``, a student in ``out``."""

    def __init__(self, source: str, out: Path, plan: Plan, *, work: Path, device: str | None = None) -> None:
        self.plan, self._out, self._work, self._source = plan, out, work, source
        self.tokenizer = pretrained(source)
        config: Any = read_config(source, layers=plan.layers, published=True)
        self._vocab_size: int = config.get_text_config().vocab_size
        if plan.max_len > (most := context_len(config)):
            raise ConfigError(f"max_len is {plan.max_len}, but {source!r} takes {most} tokens: lower it")
        self.shape = None if plan.cost is None else Shape.costing(config, plan.cost)
        if (start := plan.start) is not None:
            earlier: Any = read_config(str(start), published=True)
            with unread(str(start)):  # training begins hours later: report errors now
                draft_vocab.tokens(earlier, str(start))
            if earlier.vocab_size != self._vocab_size:
                raise ConfigError(
                    f"start is {str(start)!r}, a model of {earlier.vocab_size} tokens: give a draft model of {source!r}, "
                    f"which has {self._vocab_size}"
                )
        written = "of given prompts and the teacher's answers" if plan.prompts else "that the teacher wrote itself"
        self._origin = "of the given files" if plan.data else written
        self._texts, self._answers = work / "text", work / f"{out.name}.answers"
        self._checkpoint = work / f"{out.name}.pt"
        self._check_work()
        place = find_device(source, device)
        self._loading: dict[str, Any] = {"dtype": str(product_dtype(place)).removeprefix("torch."), "device": str(place)}
        self.teacher = Model.from_pretrained(source, **self._loading)
        self.turns = Turns.of(self.tokenizer, configured_ends(source))
        self.agreement: dict[float, float] = {}  # by temperature of the text

    def run(self, tell: Tell = lambda progress: None) -> dict[float, float]:
        """Run the remaining phases; returns the agreement on held-out answers by temperature of the text."""
        self._write(tell)
        run = self._begin()
        self._learn(run, BEFORE_ANSWERS, tell)
        self._answer(run, tell)
        self._learn(run, 1.0, tell)
        self.agreement = run.agreement(self._shards(self._texts, JUDGED_SHARDS), len(self.turns.opening))
        self._export(run)
        return self.agreement

    # text

    def _write(self, tell: Tell) -> None:
        """Let the teacher write text, or read it from files; and score it."""
        first = len(self._files(self._texts)) * 1009  # far from the seeds of an earlier run
        texts: Iterator[Text]
        if self.plan.data:
            done = sum(shard.num_texts for shard in self._shards(self._texts))
            phase, texts = "reading", islice(self._given(), done, None)
        else:
            given = self.plan.prompts is not None
            beginnings = given_prompts(self._prompts(), first) if given else own_prompts(self.turns, first)
            phase, texts = "writing", self._written(self.teacher, beginnings, seed=first)
        self._store(self._texts, texts, phase, WRITING, 0.0, tell)

    def _prompts(self) -> list[list[int]]:
        """Different prompts of the file. Raises `ConfigError` if too few are short enough for training and judging."""
        path, turns, most = self.plan.prompts, self.turns, self.plan.max_len - SHORTEST_ANSWER
        assert path is not None
        texts = dict.fromkeys(prompt.text for prompt in read_prompts(path))
        prompts = [[*turns.opening, *self.tokenizer.encode(text, add_special_tokens=False), *turns.answering] for text in texts]
        short = [prompt for prompt in prompts if len(prompt) <= most]
        if len(short) < 2:
            raise ConfigError(f"{path} has {len(short)} prompts of at most {most} tokens: give two or more, or more max_len")
        return short

    def _given(self) -> Iterator[Text]:
        """The text of files, cut into pieces. Raises `ConfigError` if it is too little for training and judging."""
        most, pieces = self.plan.max_len, list[list[int]]()
        for tokens in read(self.tokenizer, self.plan.data):
            pieces += [tokens[begin : begin + most] for begin in range(0, len(tokens) - SHORTEST_ANSWER, most)]
        if len(pieces) < 2:
            raise ConfigError(f"data has too little text: give more than {most} tokens")
        yield from (Text(piece, 1, 0.0, number % HELD_OUT == 0) for number, piece in enumerate(pieces))

    def _answer(self, run: Run, tell: Tell) -> None:
        """Let the student answer prompts of the text, and score its answers; does nothing for text of files."""
        if not self.turns.answering or self.plan.data:
            return
        prompts = [
            shard.tokens[shard.span(text)][: int(shard.prompts[text])].tolist()
            for shard in self._shards(self._texts)
            for text in shard.numbers(held_out=False)
        ]
        texts = self._written(Model(self._network(run)), given_prompts(prompts), seed=run.step)
        self._store(self._answers, texts, "answering", ANSWERING, WRITING + LEARNING * BEFORE_ANSWERS, tell)

    def _written(self, model: Model, beginnings: Iterator[Text], seed: int) -> Iterator[Text]:
        plan, score = self.plan, model is self.teacher
        return write(model, self.turns, beginnings, rows=plan.rows, max_len=plan.max_len, seed=seed, score=score)

    def _store(self, folder: Path, texts: Iterator[Text], phase: str, share: float, before: float, tell: Tell) -> None:
        """Write scored ``texts`` to ``folder``, one file for every `SHARD_TOKENS`.

        Ends with the texts, after `MAX_SHARDS`, or after ``share`` of the hours; ``before`` is the share of earlier phases.
        """
        number, kept, total = len(self._files(folder)), list[Text](), 0
        whole, spent = self.plan.hours * 3600, self._spent.get(folder.name, 0.0)
        if number and (number >= MAX_SHARDS or spent >= whole * share):
            return
        begin = time.monotonic() - spent
        for text in texts:
            if len(text.tokens) - text.prompt_len >= SHORTEST_ANSWER:
                kept.append(text)
                total += len(text.tokens)
            seconds = time.monotonic() - begin
            tell(Progress(phase, min(1.0, before + seconds / whole), total))
            if seconds >= whole * share and (number or len({text.held_out for text in kept}) == 2):  # there are both kinds
                break
            if sum(len(each.tokens) for each in kept) >= SHARD_TOKENS:
                self._keep(folder / f"{number:05d}.npz", kept)
                self._spend(folder, time.monotonic() - begin)
                number, kept = number + 1, []
                if number >= MAX_SHARDS:
                    break
        else:
            begin = -math.inf  # there are no more: a later run need not look
        if kept:
            self._keep(folder / f"{number:05d}.npz", kept)
        self._spend(folder, time.monotonic() - begin)

    def _keep(self, path: Path, texts: Sequence[Text]) -> None:
        """Write texts to a file, with the teacher's distributions."""
        shard = Shard.of(texts)
        (shard if len(shard.ids) else score(self.teacher, shard)).save(path)

    def _shards(self, folder: Path, most: int = MAX_SHARDS) -> list[Shard]:
        return [Shard.load(path) for path in self._files(folder)[:most]]

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return sorted(folder.glob("*.npz"))

    # student

    def _begin(self) -> Run:
        plan, device, schedule = self.plan, self._loading["device"], TRAINED_ON
        if self.shape is None:
            source = str(plan.start or self._source)
            student = load_trainable(source, dtype="float32", device=device, layers=plan.layers)
            predicted = draft_vocab.tokens(student.config, source)
        else:
            [shard] = self._shards(self._texts, 1)
            ids = padded(shard, next(batches(shard, range(shard.num_texts), 16_384)))
            student = cut(load_trainable(self._source, **self._loading), self.shape, ids.to(device))
            predicted, schedule = self._likely_tokens(self.shape.vocab_size), Schedule()
            student.config.draft_vocab_size = len(predicted)
        run = Run(student.train(), predicted, schedule)
        if self._checkpoint.exists():
            run.resume(self._checkpoint)
        return run

    def _network(self, run: Run) -> Network:
        """A network that runs passes of the student, with a copy of its weights."""
        return network_of(copy.deepcopy(run.student).to(self.teacher.dtype).requires_grad_(False), run.draft_ids)

    def _likely_tokens(self, number: int) -> Tensor:
        """The tokens that the student predicts, increasing ``[number]`` int64: chosen once, by what the teacher says."""
        path = self._work / f"{self._out.name}.{draft_vocab.FILE}"
        if not path.exists():
            often = likelihood(self._shards(self._texts), self._vocab_size)
            often[[*self.turns.ends]] = np.inf
            _note(path, np.sort(np.argsort(-often, kind="stable")[:number]).tolist())
        return torch.tensor(_noted(path))

    def _learn(self, run: Run, share: float, tell: Tell) -> None:
        """Learn from all text until ``share`` of the time for learning has passed."""
        seconds = self.plan.hours * 3600 * LEARNING
        judged, opening, last = self._shards(self._texts, JUDGED_SHARDS), len(self.turns.opening), run.seconds

        def report(now: Run) -> None:
            nonlocal last
            if now.seconds - last > max(60.0, seconds / 20):  # not more often, since judging takes seconds
                self.agreement, last = now.agreement(judged, opening), now.seconds
            passed = WRITING + LEARNING * now.seconds / seconds + (ANSWERING if share == 1.0 else 0.0)
            tell(Progress("learning", min(1.0, passed), now.tokens, next(iter(self.agreement.values()), None)))

        shards = [*self._shards(self._answers), *self._shards(self._texts)]
        distil(run, shards, opening, seconds * share, self._checkpoint, whole=seconds, tell=report)

    def _export(self, run: Run) -> None:
        """Write the student as an ordinary Transformers folder in bfloat16, with a model card."""
        partial = self._out.with_name(self._out.name + ".partial")
        if values := read_json(self._source, GENERATION_CONFIG):
            run.student.generation_config = GenerationConfig.from_dict(values)
        run.write(partial)
        self.tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(self._card(run), encoding="utf-8")
        for file in partial.iterdir():
            self._out.mkdir(parents=True, exist_ok=True)
            os.replace(file, self._out / file.name)
        partial.rmdir()

    def _card(self, run: Run) -> str:
        config, layers = run.student.config.get_text_config(), self.plan.layers if self.shape is None else self.shape.layers
        read, whole = (num * each + head for num, each, head in (self._network(run).weights_read, self.teacher.weights_read))
        written = sum(len(shard.tokens) for shard in self._shards(self._texts))
        figures = "\n".join(f"| {temperature:g} | {share:.3f} |" for temperature, share in self.agreement.items())
        name = Path(self._source).name
        return f"""# A draft model for {name}

Made by `cascade distill` to draft for {name}. It is not meant to be used by itself.

| | |
|---|---|
| parameters | {run.student.num_parameters():,} |
| share of the teacher's weights that a pass reads | {read / whole:.3f} |
| tokens that it predicts | {len(run.predicted):,} of {config.vocab_size:,} |
| width, layers | {config.hidden_size}, {config.num_hidden_layers} |
| it began as | {"an earlier student" if self.plan.start else f"layers {', '.join(map(str, layers))} of the teacher"} |
| text | {written:,} tokens {self._origin} |
| tokens learned from, repetitions included | {run.tokens:,} |
| steps, hours of training | {run.step:,}, {run.seconds / 3600:.2f} |

Share of positions of held-out answers at which both predict the same token, by the temperature of the answers:

| temperature | agreement |
|---|---|
{figures}
"""

    # bookkeeping

    def _check_work(self) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        about = {"model": self._source, "vocab_size": self._vocab_size, "form": FORM, "text": self._origin}
        path = self._work / "teacher.json"
        earlier = {"text": self._origin, **_noted(path)} if path.exists() else about
        if not self._files(self._texts):  # an earlier run told what was wrong before it wrote any
            earlier["text"] = self._origin
        if earlier != about:
            raise ConfigError(
                f"{self._work} is the work of {earlier['model']!r} with text {earlier['text']}, or of another version: choose "
                "another folder with --work, or remove it"
            )
        _note(path, about)
        plan, begun = self.plan, self._work / f"{self._out.name}.json"
        student = {"cost": plan.cost, "layers": [*plan.layers], "start": str(plan.start and plan.start.resolve())}
        if self._checkpoint.exists() and begun.exists() and _noted(begun) != student:
            raise ConfigError(
                f"{self._checkpoint} belongs to another student: choose another --out or --work, or remove that file"
            )
        _note(begun, student)
        self._spent: dict[str, float] = _noted(self._work / SPENT) if (self._work / SPENT).exists() else {}

    def _spend(self, folder: Path, seconds: float) -> None:
        self._spent[folder.name] = seconds
        _note(self._work / SPENT, self._spent)


def _noted(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _note(path: Path, values: Any) -> None:
    """Write JSON; a kill meanwhile leaves what was there before."""
    with replacing(path) as file:
        file.write(json.dumps(values).encode())
