"""Which rows make up the next pass. Pure; the serving tier and the simulator follow the same rules.

A pass has a budget of tokens. Sessions that decode come before those that prefill, each in its turn; a long text is read in
chunks beside them, of a size that lengthens the pass only so far. How many guesses and branches are scored beside the texts,
`cascade.planner.choice` computes.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from cascade.planner.choice import Floats, Ints, Policy, affordable
from cascade.planner.cost import Profile
from cascade.planner.tuning import MIN_BRANCH_CHANCE, PREFILL_TOKENS
from cascade.session.branches import Branch
from cascade.session.session import Work
from cascade.tier.slot import Slot, U

PRIORITY_S = 10.0  # a step of priority is worth having come so much earlier: so nobody starves
PREFILL_SHARE = 4  # prefills get at least this part of a pass, one over it
MAX_STRETCH = 3.0  # a prefill beside sessions that decode may take so many times their pass

Batch: TypeAlias = list[tuple[Slot[U], Work]]
Offers: TypeAlias = list[tuple[float, Slot[U], Branch]]  # steps of branches: the chance to be of use, the session, the branch


def rank(slot: Slot[Any]) -> float:
    """Sessions with a lower one have the older right to memory and to be read."""
    return slot.opened + PRIORITY_S * slot.session.spec.priority


def _turn(slot: Slot[Any]) -> float:
    """Sessions with a lower one have waited longer since their last pass."""
    return slot.since + PRIORITY_S * slot.session.spec.priority


def schedule(
    slots: Sequence[Slot[U]], policy: Policy, profile: Profile, max_tokens: int, now: float
) -> tuple[Batch[U], float | None]:
    """The rows of the next pass, of at most ``max_tokens``; without any, when to look again (None: when something happens).

    Those of ``slots`` that are stalled may have branches to write. A pass starts when one session wants it, and takes along
    those that still wait for guesses: it costs them less than the next. Where a tier below writes in turns with this one, it
    starts when that has written for all: passes of both at once slow each other. But a session for which no such tier writes
    waits for nobody's guesses; those that go on waiting are left out of its pass.
    """
    prefills: list[Slot[U]] = []
    decodes: list[Slot[U]] = []
    offers: Offers[U] = []
    first: float | None = None
    independent = math.inf  # when a session is due for which no tier writes in turns with this one
    awaiting: dict[Slot[U], float] = {}  # sessions for which one is to write now, and until when they wait for it
    for slot in slots:
        session = slot.session
        branches = session.branch_candidates() if session.branches is not None else []
        if session.stalled and not any(chance >= MIN_BRANCH_CHANCE for chance, _ in branches):
            continue
        if slot.least_chance or independent > now:  # else the pass starts, whatever this one waits for
            start_at = _start_at(slot, policy, profile)
            first = start_at if first is None else min(first, start_at)
            if slot.awaits_guesses:
                awaiting[slot] = start_at
            elif not slot.least_chance:
                independent = min(independent, start_at)
        if session.num_pending >= PREFILL_TOKENS:
            prefills.append(slot)
        else:
            decodes.append(slot)
            offers += [(chance, slot, branch) for chance, branch in branches]
    if first is not None and awaiting and not prefills:
        first = min(independent, max(first, *awaiting.values()))
        decodes = [slot for slot in decodes if awaiting.get(slot, now) <= now]
    if first is None or first > now:
        return [], first
    readable = _readable(prefills, decodes, profile, max_tokens)
    reserved = readable
    if prefills and decodes:
        their_turn = min(map(_turn, prefills)) < min(map(_turn, decodes))  # where a pass is too short to be shared
        reserved = min(readable, max_tokens // PREFILL_SHARE or int(their_turn))
    batch = _decode_rows(decodes, offers, max_tokens - reserved, policy.max_guesses, profile, readable)
    if not prefills:
        return batch, None
    left = max_tokens - sum(len(work) for _, work in batch)
    if batch:
        left = min(left, readable)
    return batch + _prefill_rows(prefills, left), None


def _start_at(slot: Slot[Any], policy: Policy, profile: Profile) -> float:
    """When a session should be scored with what it has; a time that has passed means now."""
    session, since = slot.session, slot.since
    stats = session.guesses.stats
    if slot.awaits_guesses:
        if slot.heard is None or session.guesses.complete or session.prefilling or not session.max_depth:
            return since
        return max(since, slot.heard) + policy.patience * profile.pass_s
    if not session.drafter or not stats.interrupted or session.prefilling or not session.max_depth:
        return since
    depth = session.likely_depth
    if depth < policy.max_guesses and depth < policy.waits_for(stats, session.max_depth):
        return since + policy.patience * profile.pass_s
    return since


def _readable(prefills: Sequence[Slot[U]], decodes: Sequence[Slot[U]], profile: Profile, max_tokens: int) -> int:
    """Tokens of prefill that a pass may read, beside sessions that decode if there are any."""
    pending = min(max_tokens, sum(slot.session.num_pending for slot in prefills))
    if not decodes or not profile.token_s:
        return pending
    pass_s = profile.predict(len(decodes), sum(slot.session.kv_len for slot in decodes))
    return min(pending, max(PREFILL_TOKENS, int(MAX_STRETCH * pass_s / profile.token_s)))


def _decode_rows(
    slots: Sequence[Slot[U]], offers: Offers[U], budget: int, max_guesses: int, profile: Profile, num_read: int
) -> Batch[U]:
    """Everyone's text before anyone's guesses and branches, and those first who wait longest.

    The pass has ``num_read`` tokens of prefill beside. What it costs whatever it has is shared by time: guesses make the
    passes for decoding fewer, but not those for reading.
    """
    texts: list[Slot[U]] = []
    own, context, left = 0.0, 0, budget  # tokens that the texts are expected to gain, positions, tokens of the pass
    for slot in sorted(slots, key=_turn):
        session = slot.session
        if not session.stalled and left > 0:
            texts.append(slot)
            own += session.chance
            context += session.kv_len
            left -= session.num_pending
            num_read += session.num_pending - 1
    if left <= 0:
        max_guesses, offers = 0, []
    # candidates: nodes of the drafts after the texts, one text after the other, then branches
    nodes: list[int] = []
    chances: list[float] = []
    bounds = [0]  # where each text's nodes begin
    for slot in texts:
        of_draft, likely = slot.session.candidates(max_guesses)
        if of_draft:
            certain = slot.session.chance
            nodes += of_draft
            chances += likely if certain == 1.0 else [certain * chance for chance in likely]
        bounds.append(len(nodes))
    chosen: list[int] = []  # the chosen nodes
    branches: list[int] = []  # the chosen offers
    if nodes or offers:
        sizes = [1] * len(nodes) + [len(branch.pending) for _, _, branch in offers]
        chances += [chance for chance, _, _ in offers]
        cost, reading_s = profile.turns(len(texts) + left, context), profile.token_s * num_read
        if reading_s:
            cost -= profile.turn(0) * reading_s / (cost[len(texts)] + reading_s)
        best = _best(np.array(chances), np.array(sizes), own, len(texts), cost)
        of_nodes = np.sort(best[best < len(nodes)])
        bounds = of_nodes.searchsorted(bounds).tolist()
        chosen = [nodes[place] for place in of_nodes.tolist()]
        branches = (best[best >= len(nodes)] - len(nodes)).tolist()
    rows: Batch[U] = []
    for place, slot in enumerate(texts):
        rows.append((slot, slot.session.work(budget, chosen[bounds[place] : bounds[place + 1]])))
        budget -= slot.session.num_pending
    return rows + [(slot, slot.session.branch_work(branch)) for _, slot, branch in map(offers.__getitem__, branches)]


def _best(chances: Floats, sizes: Ints, own: float, tokens: int, cost: Floats) -> Ints:
    """The candidates that a pass scores, see `affordable`: the likeliest first."""
    order = (-chances).argsort(kind="stable")  # the first of equal ones: a node's chance is at most its parent's
    return order[: affordable(chances[order], sizes[order], own, tokens, cost)]


def _prefill_rows(slots: Sequence[Slot[U]], budget: int) -> Batch[U]:
    """Half of the budget for the first to come, the rest for the shortest texts: neither waits for all of the other.

    The pass after the last piece of a text is the first with guesses: they are priced beside those of all others.
    """
    if not slots or budget <= 0:
        return []
    eldest = min(slots, key=rank)
    others = sorted((slot for slot in slots if slot is not eldest), key=lambda slot: (slot.session.num_pending, rank(slot)))
    rest = sum(slot.session.num_pending for slot in others)
    first = max(budget - rest, -(-budget // 2))
    rows: Batch[U] = []
    for slot in (eldest, *others):
        work = slot.session.work(first if slot is eldest else budget)
        budget -= len(work)
        rows.append((slot, work))
        if budget <= 0:
            break
    return rows
