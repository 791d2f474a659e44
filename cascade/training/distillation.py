"""Trains a student on scored texts for a given time; an interrupted run can be continued."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cascade.engine import draft_vocab
from cascade.engine.devices import product_dtype
from cascade.errors import ConfigError
from cascade.training import group
from cascade.training.text import Shard, batches, padded
from cascade.training.versions import replacing

POSITIONS = 512  # positions whose logits are in memory at the same time
NUMBERS = ("step", "tokens", "seconds")  # a run's numbers in its checkpoint
SAVE_S = 120.0  # seconds between two checkpoints

# padding comes only after the end of a row, so the kernel's causal mode suffices without a mask
CAUSAL = "cascade_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rates over a run that ends at a given time."""

    muon_lr: float = 0.01  # rate of hidden matrices (no side of which is the vocabulary); 0: AdamW trains them, too
    adam_lr: float = 5e-4  # rate of all other parameters
    warmup_steps: int = 20
    decay_share: float = 0.4  # share of the run at its end in which the rates fall to 0
    tokens: int = 4096  # tokens of a step, padding included

    def factor(self, step: int, progress: float) -> float:
        """The factor of both rates; ``progress`` is the share of the run that has passed."""
        return min(1.0, (step + 1) / self.warmup_steps, max(0.0, 1 - progress) / self.decay_share)


class Learner:
    """The optimizers of ``module``. A matrix with a side of ``vocab_size`` is not hidden.

    Processes of a `group` begin with the same weights and take the same steps, on the mean of their gradients.
    """

    def __init__(self, module: nn.Module, schedule: Schedule, vocab_size: int) -> None:
        self._schedule = schedule
        self._parameters = parameters = [p for p in module.parameters() if p.requires_grad]
        group.equalize(parameters)
        hidden = [p for p in parameters if schedule.muon_lr and p.ndim == 2 and min(p.shape) > 1 and vocab_size not in p.shape]
        rest = [p for p in parameters if all(p is not other for other in hidden)]
        # each with its rate
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0), schedule.adam_lr)
        ]
        if hidden:
            muon = torch.optim.Muon(hidden, weight_decay=0.0, adjust_lr_fn="original")
            self.optimizers.insert(0, (muon, schedule.muon_lr))

    def learn(self, loss: Tensor, step: int, progress: float) -> None:
        """Take a step down the gradient of ``loss``; see `Schedule.factor`."""
        loss.backward()
        group.average(self._parameters)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, rate in self.optimizers:
            for settings in optimizer.param_groups:
                settings["lr"] = rate * self._schedule.factor(step, progress)
            optimizer.step()
            optimizer.zero_grad()


@dataclass(slots=True)
class Run:
    """A student in training, as a checkpoint holds it."""

    student: PreTrainedModel
    draft_ids: Tensor | None = None  # [n] int64, increasing: its draft vocabulary, if it has one
    schedule: Schedule = field(default_factory=Schedule)
    step: int = 0
    tokens: int = 0  # tokens learned from, without padding
    seconds: float = 0.0  # seconds spent
    learner: Learner = field(init=False)
    predicted: Tensor = field(init=False)  # [n] int64: the tokens that it may predict
    _places: Tensor = field(init=False)  # [vocab_size] int64: of tokens in `predicted`, -1 of others

    def __post_init__(self) -> None:
        self.student.set_attn_implementation(CAUSAL)
        vocab_size = self.student.config.vocab_size
        self.predicted = (torch.arange(vocab_size) if self.draft_ids is None else self.draft_ids).to(self.student.device)
        self._places = torch.full((vocab_size,), -1, device=self.predicted.device)
        self._places[self.predicted] = torch.arange(len(self.predicted), device=self.predicted.device)
        self.learner = Learner(self.student, self.schedule, vocab_size)

    def learn(self, shard: Shard, texts: Sequence[int], opening: int, progress: float) -> float:
        """Take one step; returns its loss in nats a token. The first ``opening`` tokens of each text are context only."""
        states = self._states(padded(shard, texts).to(self.student.device))
        chosen, likeliest, wanted = (part.to(self.student.device) for part in _learnt(shard, texts, opening))
        places = self._places[likeliest]
        head = self.student.get_output_embeddings().weight.index_select(0, self.predicted)
        loss = top_cross_entropy(states.flatten(0, 1)[chosen], head, places.clamp_min(0), wanted * (places >= 0))
        self.learner.learn(loss, self.step, progress)
        self.step += 1
        self.tokens += len(chosen)
        return loss.item()

    @torch.no_grad()
    def agrees(self, shard: Shard, texts: Sequence[int], opening: int) -> list[np.ndarray]:
        """For each of some texts, whether student and teacher have the same likeliest token, by position of the answer."""
        states, correct = self._states(padded(shard, texts).to(self.student.device)), list[np.ndarray]()
        head = self.student.get_output_embeddings().weight[self.predicted].float()
        for row, text in enumerate(texts):
            span, first = shard.span(text), max(int(shard.prompts[text]) - 1, opening - 1)
            logits = states[row, first : span.stop - span.start].float() @ head.T
            correct.append(self.predicted[logits.argmax(-1)].cpu().numpy() == shard.ids[span][first:, 0])
        return correct

    def agreement(self, shards: Sequence[Shard], opening: int) -> dict[float, float]:
        """The share of positions of held-out answers at which student and teacher agree, by temperature of the text."""
        equal: dict[float, list[np.ndarray]] = {}
        for shard in shards:
            for rows in batches(shard, shard.numbers(held_out=True), self.schedule.tokens):
                for text, correct in zip(rows, self.agrees(shard, rows, opening), strict=True):
                    equal.setdefault(round(float(shard.temperatures[text]), 2), []).append(correct)
        return {temperature: float(np.concatenate(correct).mean()) for temperature, correct in sorted(equal.items())}

    def save(self, path: Path) -> None:
        """Write a checkpoint; if the process is killed meanwhile, the previous one stays."""
        state = {
            "numbers": {name: getattr(self, name) for name in NUMBERS},
            "module": self.student.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.learner.optimizers],
        }
        with replacing(path) as file:
            torch.save(state, file)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of the same student."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.student.load_state_dict(state["module"])
        for (optimizer, _), values in zip(self.learner.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        for name, value in state["numbers"].items():
            setattr(self, name, value)

    def write(self, folder: Path) -> None:
        """Write the student in bfloat16, in Transformers' format."""
        shipped = copy.deepcopy(self.student).to(torch.bfloat16).eval()
        shipped.set_attn_implementation("sdpa")
        shipped.save_pretrained(folder)
        if self.draft_ids is not None:
            draft_vocab.write(self.draft_ids, folder)

    def _states(self, ids: Tensor) -> Tensor:
        """Last hidden states ``[rows, n, width]`` after ``ids`` ``[rows, n]``."""
        dtype = product_dtype(ids.device)
        with torch.autocast(ids.device.type, dtype, enabled=dtype is torch.bfloat16):
            states: Tensor = self.student.base_model(ids, use_cache=False).last_hidden_state
        return states.float()


def _learnt(shard: Shard, texts: Sequence[int], opening: int) -> tuple[Tensor, Tensor, Tensor]:
    """The targets of a batch: positions in the padded batch, flattened, ``[positions]``; the teacher's likeliest tokens after
    each, int64 ``[positions, TOP]``; and their probabilities, float32, which sum to 1."""
    spans = [shard.span(text) for text in texts]
    longest = max(span.stop - span.start for span in spans)
    inside = [np.arange(min(opening - 1, span.stop - span.start - 1), span.stop - span.start) for span in spans]
    where = np.concatenate([row * longest + place for row, place in enumerate(inside)])
    rows = np.concatenate([span.start + place for span, place in zip(spans, inside, strict=True)])
    wanted = np.exp(shard.logprobs[rows].astype(np.float32))
    wanted /= wanted.sum(-1, keepdims=True)
    return torch.from_numpy(where), torch.from_numpy(shard.ids[rows].astype(np.int64)), torch.from_numpy(wanted)


class _TopCrossEntropy(torch.autograd.Function):
    """Computes the gradient together with the loss, part by part, so that no logits are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
        dtype = product_dtype(weight.device)
        matrix = weight.to(dtype)
        count, total = len(states), states.new_zeros(())
        grad_states, grad_weight = torch.empty_like(states), torch.zeros_like(weight, dtype=torch.float32)
        for begin in range(0, count, POSITIONS):
            part = slice(begin, begin + POSITIONS)
            x = states[part].to(dtype)
            logits = (x @ matrix.T).float()
            norm = logits.logsumexp(-1, keepdim=True)
            total = total - (wanted[part] * (logits.gather(1, ids[part]) - norm)).sum()
            probabilities = logits.sub_(norm).exp_().mul_(wanted[part].sum(-1, keepdim=True))
            slope = probabilities.scatter_add_(1, ids[part], -wanted[part]).to(dtype)
            grad_states[part] = (slope @ matrix).to(states.dtype)
            grad_weight += (slope.T @ x).float()
        ctx.save_for_backward(grad_states / count, grad_weight / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grads[0], grad_weight * grads[0], None, None


def top_cross_entropy(states: Tensor, weight: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """Mean over positions of ``-sum_k wanted_k log softmax(states @ weight.T)[ids_k]``, nats.

    ``states`` ``[positions, width]``, ``weight`` ``[vocab, width]``, ``ids`` ``[positions, k]`` int64, ``wanted``
    ``[positions, k]`` float32: the teacher's probabilities of these tokens. Products are in `product_dtype`, sums in float32.
    This is the forward Kullback-Leibler divergence up to a constant (Hinton, Vinyals, Dean, arXiv 1503.02531), cut off at the
    likeliest.
    """
    loss: Tensor = _TopCrossEntropy.apply(states, weight, ids, wanted)  # type: ignore[no-untyped-call]
    return loss


def epochs(shards: Sequence[Shard], tokens: int, seed: int) -> Iterator[tuple[Shard, list[int]]]:
    """Endless batches: in each epoch every text that is not held out once, in random order.

    Raises `ConfigError` if there is none.
    """
    rng = np.random.default_rng(seed)
    while True:
        order = [(shard, rows) for shard in shards for rows in batches(shard, shard.numbers(held_out=False), tokens)]
        if not order:
            raise ConfigError("There is no text for training, since all of it is held out: give more prompts")
        for index in rng.permutation(len(order)):
            yield order[index]


def distil(
    run: Run,
    shards: Sequence[Shard],
    opening: int,
    seconds: float,
    checkpoint: Path,
    *,
    whole: float | None = None,
    tell: Callable[[Run], object] = lambda run: None,
) -> None:
    """Train until ``run.seconds`` reaches ``seconds``; ``tell`` is called after every step.

    Learning rates reach 0 at ``whole`` seconds, by default at the end.
    """
    saved = time.monotonic()
    for shard, texts in epochs(shards, run.schedule.tokens, run.step):
        if run.seconds >= seconds:
            break
        begin = time.monotonic()
        run.learn(shard, texts, opening, run.seconds / (whole or seconds))
        run.seconds += time.monotonic() - begin
        tell(run)
        if time.monotonic() - saved > SAVE_S:
            run.save(checkpoint)
            saved = time.monotonic()
    run.save(checkpoint)
