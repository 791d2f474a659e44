"""Own tokens of rows whose noise is not the shared one: drawn with keys of their own, and by the rules of `acceptance`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cascade.draft import Dist
from cascade.engine.sampling.acceptance import RULES, Rule, judge
from cascade.engine.sampling.own_tokens import adjust, keyed_gumbel, keyed_uniform
from cascade.scorer import Draw, Row, Scored


def drawn(shaped: Tensor, rows: Sequence[Row], scored: Sequence[Scored]) -> list[Scored]:
    """``scored``, but for rows with a `Draw`, of which it says what this draws from their ``shaped`` logits ``[N, V]``.

    One host read for each such row. As many own tokens count as before: a grammar may not have followed all guesses.
    """
    found, begin = list(scored), 0
    for place, row in enumerate(rows):
        if row.draw is not None and scored[place].own:
            own, dists = own_tokens(shaped[begin : begin + len(scored[place].own)], row, row.draw)
            found[place] = Scored(own.tolist(), dists=dists)
        begin += row.num_scored
    return found


def own_tokens(logits: Tensor, row: Row, draw: Draw) -> tuple[Tensor, Sequence[Dist]]:
    """Own tokens ``[n]`` int64 for the logits ``[n, V]`` of one row, and what each was drawn from if that is wanted."""
    n, vocab_size = logits.shape
    keys = torch.tensor(draw.keys[:n]).to(logits.device, non_blocking=True)
    ids, best = _choices(logits, row, draw)
    dists = [] if draw.draft_top_k is None else [Dist(*pair) for pair in zip(ids, best.softmax(-1), strict=True)]
    # that after the last one, too: whether there is an own token there must not change what becomes of it
    guesses = row.draft.first(n)
    if draw.rule not in RULES or not guesses.dists:
        # nobody drew the guesses, or each with certainty: then the rules are to compare them with samples
        chosen = (best + keyed_gumbel(keys, ids)).argmax(-1, keepdim=True)
        return ids.gather(1, chosen)[:, 0], dists
    p = torch.zeros(n, vocab_size, device=logits.device).scatter(1, ids, best.softmax(-1))
    p = torch.cat([p, p[: 1 + len(guesses) - n]])  # of what is after the last guess, if nobody knows
    x = torch.tensor(guesses.tokens).to(logits.device, non_blocking=True)
    q = _dense(guesses.dists, vocab_size, logits.device)
    return judged(RULES[draw.rule], p, q, x, torch.cat([keys, keys[: 1 + len(guesses) - n]]))[:n], dists


def judged(rule: Rule, p: Tensor, q: Tensor, x: Tensor, keys: Tensor) -> Tensor:
    """Own tokens ``[n + 1]`` of a line, see `acceptance`, with the noise of ``keys`` ``[n + 1]``; without a host read.

    Those after the first that is no guess mean nothing.
    """
    accepted, rest = judge(rule, p, q, x, keyed_uniform(keys[:-1]))
    noise = keyed_gumbel(keys.index_select(0, accepted), torch.arange(p.shape[-1], device=p.device))
    new = (rest.log() + noise).argmax(-1)
    places = torch.arange(len(keys), device=p.device)
    return torch.where(places < accepted, torch.cat([x, new]), new)


def _choices(logits: Tensor, row: Row, draw: Draw) -> tuple[Tensor, Tensor]:
    """Token ids ``[n, k]`` that own tokens are among, and their scores."""
    vocab_size = logits.shape[-1]
    scores = adjust(logits, [row.params] * len(logits))
    if draw.draft_top_k is not None and 0 < draw.draft_top_k < vocab_size:
        best, ids = scores.topk(draw.draft_top_k, dim=-1)
        return ids, best
    return torch.arange(vocab_size, device=logits.device).expand_as(scores), scores


def _dense(dists: Sequence[Dist], vocab_size: int, device: torch.device) -> Tensor:
    """Probabilities ``[n, V]`` float32. Tokens that this model does not know have none."""
    dense = torch.zeros(len(dists), vocab_size, device=device)
    for row, dist in zip(dense, dists, strict=True):
        if not len(dist.ids):
            continue
        probs = torch.as_tensor(dist.probs, dtype=torch.float32, device=device)
        ids = torch.as_tensor(dist.ids, dtype=torch.long, device=device)
        row.index_add_(0, ids.clamp(max=vocab_size - 1), probs * (ids < vocab_size))
    return dense
