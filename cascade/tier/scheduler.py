"""Chooses the rows of the next pass. Pure; the serving tier and the simulator use the same rules.

A pass has a budget of tokens. Sessions that decode come before those that prefill. A long text is read in chunks beside them,
whose size is bounded by how much they may lengthen the pass. `cascade.planner.choice` computes how many guesses and branches
are scored beside the texts.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from cascade.planner.choice import Policy, affordable
from cascade.planner.cost import Profile
from cascade.planner.tuning import MIN_BRANCH_CHANCE, PREFILL_TOKENS, TRIED_SHARE
from cascade.session.branches import Branch
from cascade.session.session import Work
from cascade.tier.slot import Slot, U

PRIORITY_S = 10.0  # one step of priority counts as arriving this much earlier, so no request starves
PREFILL_SHARE = 4  # prefills get at least 1 / PREFILL_SHARE of a pass
MAX_STRETCH = 3.0  # a prefill beside sessions that decode may take this many times the time of their pass

Batch: TypeAlias = list[tuple[Slot[U], Work]]
Offers: TypeAlias = list[tuple[float, Slot[U], Branch]]  # steps of branches, each with its chance to be of use


def rank(slot: Slot[Any]) -> float:
    """Sessions with a lower rank come first for memory and for prefill."""
    return slot.opened + PRIORITY_S * slot.session.spec.priority


def _turn(slot: Slot[Any]) -> float:
    """Sessions with a lower value have waited longer since their last pass."""
    return slot.since + PRIORITY_S * slot.session.spec.priority


def schedule(
    slots: Sequence[Slot[U]], policy: Policy, profile: Profile, max_tokens: int, now: float
) -> tuple[Batch[U], float | None]:
    """The rows of the next pass, of at most ``max_tokens``; if none, when to try again (None: when something happens).

    Stalled sessions may have branches to extend. A pass starts when one session is due, and includes those that still wait
    for guesses: that costs them less than the next pass. Where a tier below takes turns with this one, the pass starts when
    that tier has drafted for all, since passes of both at once slow each other. But a session without such a tier does not
    wait for guesses of others; sessions that keep waiting are left out of its pass.
    """
    prefills: list[Slot[U]] = []
    decodes: list[Slot[U]] = []
    offers: Offers[U] = []
    first: float | None = None
    independent = math.inf  # when the first session is due for which no tier drafts in turns with this one
    awaiting: dict[Slot[U], float] = {}  # sessions that wait for guesses of a tier in turns, and until when
    for slot in slots:
        session = slot.session
        branches = session.branch_candidates() if session.branches is not None else []
        if session.stalled and not any(chance >= MIN_BRANCH_CHANCE for chance, _ in branches):
            continue
        if slot.least_chance or independent > now:  # otherwise the pass starts in any case
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
        their_turn = min(map(_turn, prefills)) < min(map(_turn, decodes))  # for a pass that is too small to be shared
        reserved = min(readable, max_tokens // PREFILL_SHARE or int(their_turn))
    batch = _decode_rows(decodes, offers, max_tokens - reserved, policy.max_guesses, profile, readable)
    if not prefills:
        return batch, None
    left = max_tokens - sum(len(work) for _, work in batch)
    if batch:
        left = min(left, readable)
    return batch + _prefill_rows(prefills, left), None


def _start_at(slot: Slot[Any], policy: Policy, profile: Profile) -> float:
    """When a session should be scored with the guesses it has; a time in the past means now."""
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
    """Tokens of prefill that a pass may read; fewer beside sessions that decode."""
    pending = min(max_tokens, sum(slot.session.num_pending for slot in prefills))
    if not decodes or not profile.token_s:
        return pending
    pass_s = profile.predict(len(decodes), sum(slot.session.kv_len for slot in decodes))
    return min(pending, max(PREFILL_TOKENS, int(MAX_STRETCH * pass_s / profile.token_s)))


def _decode_rows(
    slots: Sequence[Slot[U]], offers: Offers[U], budget: int, max_guesses: int, profile: Profile, num_read: int
) -> Batch[U]:
    """The texts of all sessions, the longest waiting first; then guesses and branches.

    The pass also has ``num_read`` tokens of prefill. Its fixed cost is shared in proportion to time between decoding and
    prefill: guesses save passes for decoding, but none for prefill.
    """
    texts: list[Slot[U]] = []
    own, context, left = 0.0, 0, budget  # tokens that the texts gain on average, positions, tokens left
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
        each, size = np.array(chances), np.array(sizes)
        order = (-each).argsort(kind="stable")  # stable: a node's chance is at most its parent's, which stands before it
        each, size = each[order], size[order]  # the likeliest first
        worth = affordable(each, size, own, len(texts), cost)
        if worth < len(order) and texts:
            # a size that was timed too dear would never be tried, and so stay too dear
            tried = worth + max(1, worth, len(texts) // TRIED_SHARE)
            read = len(texts) + size[:tried].cumsum()
            if profile.stale(int(read[-1])):
                worth = int(read.searchsorted(len(cost)))
        best = order[:worth]
        of_nodes = np.sort(best[best < len(nodes)])
        bounds = of_nodes.searchsorted(bounds).tolist()
        chosen = [nodes[place] for place in of_nodes.tolist()]
        branches = (best[best >= len(nodes)] - len(nodes)).tolist()
    rows: Batch[U] = []
    for place, slot in enumerate(texts):
        rows.append((slot, slot.session.work(budget, chosen[bounds[place] : bounds[place + 1]])))
        budget -= slot.session.num_pending
    return rows + [(slot, slot.session.branch_work(branch)) for _, slot, branch in map(offers.__getitem__, branches)]


def _prefill_rows(slots: Sequence[Slot[U]], budget: int) -> Batch[U]:
    """Half of the budget goes to the first session by rank, the rest to the shortest texts, so that neither blocks the other.

    Guesses after a text are scored from the pass after its last piece on: they are priced together with all others.
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
