"""Own tokens of rows whose noise is not the shared one: drawn with keys of their own, and by the rules of `acceptance`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cascade.draft import Dist
from cascade.engine.acceptance import RULES, Rule, judge, siblings
from cascade.engine.sampling import adjust, apart, keyed_gumbel, keyed_uniform
from cascade.scorer import Draw, Row, Scored, Sibling

PARTS = 2**30  # of a probability that comes to the host as an integer
NOTHING = Dist((), ())


def drawn(shaped: Tensor, rows: Sequence[Row], scored: Sequence[Scored]) -> list[Scored]:
    """``scored``, but for rows with a `Draw`, of which it says what this draws from their ``shaped`` logits ``[N, V]``.

    One host read for each such row. As many own tokens count as before: a grammar may not have followed all guesses.
    """
    told, begin = list(scored), 0
    for place, row in enumerate(rows):
        if row.draw is not None and scored[place].own:
            known = len(scored[place].own)
            told[place] = _said(shaped[begin : begin + known], row, row.draw, scored[place])
        begin += row.num_scored
    return told


def _said(logits: Tensor, row: Row, draw: Draw, scored: Scored) -> Scored:
    """What a pass says of one row with logits ``[n, V]``."""
    if not draw.keys:
        return replace(scored, dists=_dists(*_choices(logits, row, draw)))
    if not row.draft.is_line:
        return tree_tokens(_dists(*_choices(logits, row, draw)), logits.shape[-1], row, draw)
    own, dists = own_tokens(logits, row, draw)
    return _told(own, dists, draw)


def own_tokens(logits: Tensor, row: Row, draw: Draw) -> tuple[Tensor, Sequence[Dist]]:
    """Own tokens ``[n]`` int64 for the logits ``[n, V]`` of one row, and what each was drawn from if that is wanted."""
    n, vocab_size = logits.shape
    keys = torch.tensor(draw.keys[:n]).to(logits.device, non_blocking=True)
    ids, best = _choices(logits, row, draw)
    dists = _dists(ids, best) if draw.likeliest is not None else ()
    # that behind the last one, too: whether there is an own token there must not change what becomes of it
    guesses = row.draft.first(n)
    if draw.rule not in RULES or not guesses.dists:
        # nobody drew the guesses, or each with certainty: then the rules are to compare them with samples
        chosen = (best + keyed_gumbel(keys, ids)).argmax(-1, keepdim=True)
        return ids.gather(1, chosen)[:, 0], dists
    p = torch.zeros(n, vocab_size, device=logits.device).scatter(1, ids, best.softmax(-1))
    p = torch.cat([p, p[: 1 + len(guesses) - n]])  # of what is behind the last guess, if nobody knows
    x = torch.tensor(guesses.tokens).to(logits.device, non_blocking=True)
    q = _dense(guesses.dists, vocab_size, logits.device)
    return judged(RULES[draw.rule], p, q, x, torch.cat([keys, keys[: 1 + len(guesses) - n]]))[:n], dists


def judged(rule: Rule, p: Tensor, q: Tensor, x: Tensor, keys: Tensor) -> Tensor:
    """Own tokens ``[n + 1]`` of a line, see `acceptance`, with the noise of ``keys`` ``[n + 1]``; without a host read.

    Those behind the first that is no guess mean nothing.
    """
    accepted, rest = judge(rule, p, q, x, keyed_uniform(keys[:-1]))
    noise = keyed_gumbel(keys.index_select(0, accepted), torch.arange(p.shape[-1], device=p.device))
    new = (rest.log() + noise).argmax(-1)
    places = torch.arange(len(keys), device=p.device)
    return torch.where(places < accepted, torch.cat([x, new]), new)


def tree_tokens(dists: Sequence[Dist], vocab_size: int, row: Row, draw: Draw) -> Scored:
    """What a pass says of a row whose draft is a tree: ``dists`` are those of its places, the text's end and then each node.

    They may end before the places do. Of places behind their end nothing is said.
    """
    draft = row.draft
    device = torch.as_tensor(dists[0].probs).device
    families: list[list[int]] = [[] for _ in range(1 + len(draft))]  # children by place
    for node in range(len(draft)):
        families[1 + draft.parent(node)].append(node)
    most = max(map(len, families))
    tokens = [[draft.tokens[node] for node in family] + [-1] * (most - len(family)) for family in families]
    ways = [[1 + node for node in family] + [place] * (most - len(family) + 1) for place, family in enumerate(families)]
    p = _dense([*dists, *[NOTHING] * (len(families) - len(dists))], vocab_size, device)
    q = _dense([draft.dists[family[0]] if family else NOTHING for family in families], vocab_size, device)
    x, places, keys = (torch.tensor(each).to(device, non_blocking=True) for each in (tokens, ways, draw.keys))
    own = judged_tree(p, q, x, places, keys, draft.height)
    return _told(own[: len(dists)], dists, draw)


def judged_tree(p: Tensor, q: Tensor, x: Tensor, ways: Tensor, keys: Tensor, height: int) -> Tensor:
    """Own tokens ``[n]`` of the places of a tree, the text's end first, with noise of ``keys`` ``[n]``; without a host read.

    ``p``, ``q`` ``[n, V]`` and ``x`` ``[n, k]`` are as `acceptance.siblings` has them, the siblings behind each place; ``ways``
    ``[n, k + 1]`` are their places, and at last the place itself. Own tokens mean nothing off the way that they take.
    """
    chances, rest = siblings(p, q, x)
    lots = torch.stack([keyed_uniform(keys, number) for number in range(x.shape[1])], 1)
    passed = torch.cat([lots < chances, torch.ones_like(keys, dtype=torch.bool)[:, None]], 1)
    first = passed.long().argmax(-1, keepdim=True)
    next_ = ways.gather(1, first)[:, 0]
    at = torch.zeros_like(keys[:1])
    for _ in range(height):
        at = next_.index_select(0, at)
    noise = keyed_gumbel(keys.index_select(0, at), torch.arange(p.shape[-1], device=p.device))
    new = (rest.index_select(0, at).log() + noise).argmax(-1)
    accepted = torch.cat([x, torch.full_like(x[:, :1], -1)], 1).gather(1, first)[:, 0]
    return torch.where(accepted >= 0, accepted, new)


def others(ids: Tensor, probs: Tensor, own: Tensor, keys: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Siblings ``[n, number]`` of own tokens ``[n]``, drawn with noise of ``keys`` ``[n]``, none twice; -1: there is no more.

    Each is drawn from the ``probs`` ``[n, k]`` of tokens ``ids`` ``[n, k]`` that the own token and the siblings before it have
    left; beside it stands how much that is. They are the largest of log-probability plus Gumbel noise, in this order: Kool,
    van Hoof, Welling, "Stochastic beams and where to find them", arXiv 1903.06059.
    """
    taken = ids == own[:, None]
    scores = probs.log().masked_fill(taken, -torch.inf) + keyed_gumbel(apart(keys), ids)
    best, order = scores.topk(min(number, ids.shape[-1]), dim=-1)
    before = torch.cat([(probs * taken).sum(-1, keepdim=True), probs.gather(1, order)[:, :-1]], 1).cumsum(-1)
    return torch.where(best > -torch.inf, ids.gather(1, order), -1), (1 - before).clamp(min=0)


def _told(own: Tensor, dists: Sequence[Dist], draw: Draw) -> Scored:
    """The same on the host: one read."""
    told = dists if draw.likeliest is not None else ()
    if not draw.siblings:
        return Scored(own.tolist(), dists=told)
    keys = torch.tensor(draw.keys[: len(own)]).to(own.device, non_blocking=True)
    ids, probs = torch.stack([dist.ids for dist in dists]), torch.stack([dist.probs for dist in dists])
    tokens, left = others(ids, probs, own, keys, draw.siblings)
    known = torch.cat([own[:, None], tokens, (left * PARTS).long()], 1).tolist()
    number = tokens.shape[1]
    beside = [
        [Sibling(token, part / PARTS) for token, part in zip(one[1 : 1 + number], one[1 + number :], strict=True) if token >= 0]
        for one in known
    ]
    return Scored([one[0] for one in known], dists=told, siblings=beside)


def _choices(logits: Tensor, row: Row, draw: Draw) -> tuple[Tensor, Tensor]:
    """Token ids ``[n, k]`` that own tokens are among, and their scores."""
    vocab_size = logits.shape[-1]
    scores = adjust(logits, row.params)
    if draw.likeliest is not None and 0 < draw.likeliest < vocab_size:
        best, ids = scores.topk(draw.likeliest, dim=-1)
        return ids, best
    return torch.arange(vocab_size, device=logits.device).expand_as(scores), scores


def _dists(ids: Tensor, best: Tensor) -> list[Dist]:
    return [Dist(*one) for one in zip(ids, best.softmax(-1), strict=True)]


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
