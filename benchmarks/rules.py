"""Rules for accepting guesses, side by side on one pair of models: what each would accept of the same drafts, from logits.

    python -m benchmarks.rules

SmolLM2-135M-Instruct answers chats. After every second token of an answer the medium model that ships drafts a window of
tokens, and the large one scores them. Of each draft every rule's chances are computed, not drawn. The rules:

* ``ratio``: a guess is right with probability min(1, p/q), else a sample of (p - q)+ replaces it (Leviathan et al., arXiv
  2211.17192; Chen et al., arXiv 2302.01318)
* ``block``: the same for the window as a whole (Sun et al., arXiv 2403.10444)
* ``coupled``: a guess is right if it is the verifier's own token under shared noise (Daliri et al., arXiv 2408.07978)
* ``coupled, runner-ups``: the drafter's runner-up is scored beside each guess, and may be right in its place
* ``coupled, drawn``: what own tokens of the server accept with the noise of one seed: a check of ``coupled``

The last line is one JSON document.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.document import console, finish, parsed, parser, stamp, timed
from benchmarks.prompts import by_category
from cascade import SamplingParams, family
from cascade.agreement import record
from cascade.engine.checkpoint import load
from cascade.engine.model import Model
from cascade.engine.sampling.own_tokens import adjust, own_tokens_and_next
from cascade.scorer import Row
from cascade.simulation.recording import RecordedText

TEMPERATURES = (0.3, 0.7, 1.0)
WINDOW = 4  # tokens of a draft
EVERY = 2  # tokens of an answer between drafts
TOKENS = 64  # of an answer


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts ``[..., n]`` and the distributions, float64, by which they are judged."""

    p: Tensor  # the verifier's, [..., n + 1, V]: at each token of a draft, and after the last one
    q: Tensor  # the drafter's, [..., n, V]
    tokens: Tensor  # [..., n] int64, drawn from q
    runner_ups: Tensor  # [..., n] int64: what the drafter would have drawn next

    def chances(self, of: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities ``[..., n]`` of tokens ``[..., n]`` at the verifier and at the drafter."""
        places = of[..., None]
        return self.p[..., :-1, :].gather(-1, places)[..., 0], self.q.gather(-1, places)[..., 0]


class Judged(NamedTuple):
    """What a rule makes of drafts whose tokens are accepted, or replaced by a sample of ``(weight * p - q)+``."""

    reached: Tensor  # [..., n]: probabilities that at least 1, 2, ... n tokens are accepted
    weights: Tensor  # [..., n], of the token that replaces the 1st, 2nd, ... n-th


def ratio(drafts: Drafts) -> Judged:
    """Each token by itself."""
    p, q = drafts.chances(drafts.tokens)
    return Judged((p / q).clamp(max=1).cumprod(-1), torch.ones_like(p))


def block(drafts: Drafts) -> Judged:
    """The longest beginning that is accepted as a whole."""
    p, q = drafts.chances(drafts.tokens)
    weight, weights, keeps = torch.ones_like(p[..., 0]), [], []
    for place in range(p.shape[-1]):
        if place:
            left = (weight[..., None] * drafts.p[..., place, :] - drafts.q[..., place, :]).clamp(min=0).sum(-1)
            keeps.append(torch.where(left > 0, left / (left + 1 - weight), 0))
        weights.append(weight)
        weight = (weight * p[..., place] / q[..., place]).clamp(max=1)
    keeps.append(weight)
    stops = (1 - torch.stack(keeps, -1)).flip(-1).cumprod(-1).flip(-1)  # that no beginning from this length on is accepted
    return Judged(1 - stops, torch.stack(weights, -1))


def coupled(drafts: Drafts) -> Tensor:
    """Probabilities ``[..., n]`` that a token drawn by the drafter is the verifier's own under the same noise.

    P(both draw x) = 1 / sum over j of max(p_j / p_x, q_j / q_x).
    """
    p, q = drafts.chances(drafts.tokens)
    return p / torch.maximum(drafts.p[..., :-1, :] * q[..., None], drafts.q * p[..., None]).sum(-1)


def runner_up(drafts: Drafts) -> Tensor:
    """Probabilities ``[..., n]`` that the runner-up y of a token x drawn by the drafter is the verifier's own.

    With exponential clocks E, of which the drafter takes the least E_j / q_j and the verifier the least E_j / p_j, E_x lies
    between E_y p_x / p_y and E_y q_x / q_y, and all others above E_y max(p_j / p_y, q_j / q_y): an integral over E_y.
    """
    (px, qx), (py, qy) = drafts.chances(drafts.tokens), drafts.chances(drafts.runner_ups)
    every = torch.maximum(drafts.p[..., :-1, :] * qy[..., None], drafts.q * py[..., None]).sum(-1)
    others = every - torch.maximum(px * qy, qx * py)
    both = qx * qy / (1 - qx)  # that the drafter draws x first and y next
    joint = py * qy * (1 / (others + px * qy) - 1 / (others + qx * py))
    return torch.where((qx * py > px * qy) & (both > 0), joint / both, 0)


Accepted: TypeAlias = tuple[Tensor, Tensor]  # of each draft: that its first guess is right, and how many are expected to be


def by_reached(reached: Tensor) -> Accepted:
    return reached[..., 0], reached.sum(-1)


def with_runner_ups(drafts: Drafts) -> Accepted:
    """Trunk as `coupled`; where it ends, the runner-up may be right, and is the last one."""
    keep, instead = coupled(drafts), runner_up(drafts)
    before = torch.cat([torch.ones_like(keep[..., :1]), keep.cumprod(-1)[..., :-1]], -1)
    return keep[..., 0] + instead[..., 0], (before * (keep + instead)).sum(-1)


RULES: Mapping[str, Callable[[Drafts], Accepted]] = {
    "ratio": lambda drafts: by_reached(ratio(drafts).reached),
    "block": lambda drafts: by_reached(block(drafts).reached),
    "coupled": lambda drafts: by_reached(coupled(drafts).cumprod(-1)),
    "coupled, runner-ups": with_runner_ups,
}


class Pair:
    """A drafter and its verifier."""

    def __init__(self, drafter: Model, verifier: Model) -> None:
        self.drafter, self.verifier = drafter, verifier

    def drafts(self, text: RecordedText, params: SamplingParams) -> tuple[Drafts, Tensor]:
        """Drafts within an answer, and of each token whether the verifier's own is the same with the seed of ``params``."""
        answer = text.output
        tokens = [*text.prompt, *answer]
        starts = range(len(text.prompt), len(tokens), EVERY)
        forks = _forks(self.drafter, tokens, starts)
        paths = [[tokens[start - 1]] for start in starts]
        seconds, q = [], []
        for step in range(WINDOW):
            ends = zip(forks, starts, paths, strict=True)
            logits = self.drafter.logits([Row(fork, start - 1 + step, path[-1:], 1, params) for fork, start, path in ends])
            own, second, _ = own_tokens_and_next(logits, [(params, start + step, 1) for start in starts], 1).tolist()
            for path, token in zip(paths, own, strict=True):
                path.append(token)
            seconds.append(second)
            q.append(_probabilities(logits, params))
        forks = _forks(self.verifier, tokens, starts)
        rows = [Row(fork, start - 1, path, len(path), params) for fork, start, path in zip(forks, starts, paths, strict=True)]
        logits = self.verifier.logits(rows)
        own = own_tokens_and_next(logits, [(params, start, WINDOW + 1) for start in starts])[0].view(len(starts), -1)
        drawn = torch.tensor(paths)[:, 1:]
        p = _probabilities(logits, params).view(len(starts), WINDOW + 1, -1)
        return Drafts(p, torch.stack(q, 1), drawn, torch.tensor(seconds).T), own[:, :-1] == drawn


def _forks(model: Model, tokens: Sequence[int], starts: Sequence[int]) -> list[Any]:
    """Stores that hold all before the last token that is known at each of ``starts``."""
    store = model.new_cache()
    store.reserve(len(tokens) + WINDOW)
    model.run([Row(store, 0, tokens, 0, SamplingParams(temperature=0, seed=0))])
    return [store.fork(start - 1) for start in starts]


def _probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    return adjust(logits, [params] * len(logits)).double().softmax(-1)


def measure(pair: Pair, texts: Sequence[RecordedText], temperature: float) -> dict[str, Any]:
    """By rule: how often the first guess is right, how many of a window are, and the second's standard error over answers."""
    figures: dict[str, list[tuple[float, float]]] = {}
    drafted = 0
    for seed, text in enumerate(texts):
        drafts, same = pair.drafts(text, SamplingParams(temperature=temperature, seed=seed))
        drafted += len(same)
        judged = {name: rule(drafts) for name, rule in RULES.items()}
        judged["coupled, drawn"] = by_reached(same.double().cumprod(-1))
        for name, (first, accepted) in judged.items():
            figures.setdefault(name, []).append((first.mean().item(), accepted.mean().item()))
    rules = {name: _summary(shares) for name, shares in figures.items()}
    console.print(temperature, rules)
    return {"drafts": drafted, "rules": rules}


def _summary(shares: Sequence[tuple[float, float]]) -> dict[str, float]:
    firsts, accepted = zip(*shares, strict=True)
    error = statistics.stdev(accepted) / len(accepted) ** 0.5
    means = {"first": statistics.fmean(firsts), "accepted": statistics.fmean(accepted), "error": error}
    return {name: round(value, 3) for name, value in means.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("rules", "What each rule accepts of the same drafts."), arguments)
    _, medium, full = family.paths()
    prompts, tokens = (by_category(1)[:2], 8) if chosen.quick else (by_category(None), TOKENS)
    document: dict[str, Any] = stamp() | {"model": "medium for " + family.MODEL, "window": WINDOW, "temperatures": {}}
    answers = {
        temperature: record([full], prompts, SamplingParams(temperature=temperature, max_tokens=tokens)).texts
        for temperature in TEMPERATURES
    }
    with (
        closing(Model(load(medium, dtype="float32", device="cpu", draft=True))) as drafter,
        closing(Model.from_pretrained(full, dtype="float32", device="cpu")) as verifier,
    ):
        for temperature, texts in answers.items():
            figures = timed(str(temperature), partial(measure, Pair(drafter, verifier), texts, temperature))
            document["temperatures"][str(temperature)] = figures
    finish(document, {key: figures["rules"] for key, figures in document["temperatures"].items()}, chosen.results)


if __name__ == "__main__":
    main()
