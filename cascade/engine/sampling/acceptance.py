"""Rules by which a verifier accepts a line of guesses, as definitions of its own tokens.

    p  [n + 1, V]  what the verifier gives tokens after the text, and after each of n guesses
    q  [n, V]      what each guess was drawn from
    x  [n]         the guesses, token ids
    u  [n]         uniform noise from 0 to 1, independent of the guesses and of what they were drawn with

The own token after an accepted guess is the next guess, if that is accepted, too, and else a sample of the *rest*, which never
is that guess. So whoever compares guesses with own tokens finds those right that the rule accepts, and nothing else changes.

    ratio    accepts x_i with probability min(1, p(x_i) / q(x_i)), if the guesses before it are; its rest is (p - q)+.
             Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    block    judges guesses together, and accepts as many or more on average, more than any other rule of this kind.
             Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444, algorithm 2.

Both keep the law of the verifier if ``u`` and what the rest is drawn with are noise of their own: with that
of the guesses they are biased.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Weighed(NamedTuple):
    """What a rule says of a line of guesses before it draws lots."""

    chances: Tensor  # [n]: a guess passes if its lot is below
    rest: Tensor  # [n + 1, V], up to a factor: what the own token is drawn from where so many guesses are accepted


class Rule(NamedTuple):
    """``weigh`` takes p, q and x, ``accepted`` which guesses pass, bool ``[n]``; it says how many are accepted, int64."""

    weigh: Callable[[Tensor, Tensor, Tensor], Weighed]
    accepted: Callable[[Tensor], Tensor]


Verdict: TypeAlias = tuple[Tensor, Tensor]


def judge(rule: Rule, p: Tensor, q: Tensor, x: Tensor, u: Tensor) -> Verdict:
    """How many guesses are accepted, int64 ``[1]``; what the own token after them is drawn from, ``[1, V]`` up to a factor."""
    weighed = rule.weigh(p, q, x)
    accepted = rule.accepted(u < weighed.chances)[None]
    return accepted, weighed.rest.index_select(0, accepted)


def ratio(p: Tensor, q: Tensor, x: Tensor) -> Weighed:
    """Each guess by itself."""
    left = _without((p[:-1] - q).clamp(min=0), x)
    same = left.sum(-1) == 0  # p and q, so that nothing could replace the guess
    return Weighed(torch.where(same, 1.0, _ratios(p, q, x).clamp(max=1)), torch.cat([left, p[-1:]]))


def block(p: Tensor, q: Tensor, x: Tensor) -> Weighed:
    """The likelier the line up to a guess is for the verifier, the more of what follows may have gone wrong.

    w_0 = 1,   w_i = min(1, w_(i-1) p(x_i) / q(x_i)),   s_i = sum (w_i p - q)+ of the tokens after x_i
    guess i passes with probability s_i / (s_i + 1 - w_i), the last one with w_n; all up to the last that passes are accepted,
    and the rest is (w p - q)+
    """
    weights = _weights(_ratios(p, q, x))
    left = (weights[:-1, None] * p[:-1] - q).clamp(min=0)
    sums, inner = left.sum(-1)[1:], weights[1:-1]
    chances = torch.cat([torch.where(inner < 1, sums / (sums + 1 - inner), 1.0), weights[-1:]])
    left = _without(left, x)
    same = (weights[:-1] == 1) & (left.sum(-1) == 0)  # p and q of the next guess, so that nothing could replace it
    return Weighed(torch.where(same, 1.0, chances), torch.cat([left, p[-1:]]))


def _ratios(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """``p(x) / q(x)`` ``[n]``, finite whatever a drafter says."""
    return _at(p[:-1], x) / _at(q, x).clamp(min=torch.finfo(q.dtype).tiny)


def _weights(ratios: Tensor) -> Tensor:
    """``w`` ``[n + 1]`` of ratios ``[n]``: log w_i = min(0, log w_(i-1) + r_i) = s_i - max(s_0, ..., s_i), s the sums of r."""
    sums = torch.cat([ratios.new_zeros(1), ratios.log().cumsum(0)])
    return (sums - sums.cummax(0).values).exp()


def _at(dists: Tensor, x: Tensor) -> Tensor:
    return dists.gather(1, x[:, None])[:, 0]


def _without(dists: Tensor, x: Tensor) -> Tensor:
    """Without the guess, of which rounding may have left something."""
    return dists.scatter(1, x[:, None], 0.0)


def leading(passed: Tensor) -> Tensor:
    """Guesses up to the first that does not pass."""
    return passed.long().cumprod(0).sum()


def last(passed: Tensor) -> Tensor:
    """Guesses up to the last that passes."""
    return (passed * torch.arange(1, len(passed) + 1, device=passed.device)).amax(0)


RULES = {"ratio": Rule(ratio, leading), "block": Rule(block, last)}
