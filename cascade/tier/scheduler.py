"""Which rows make up the next pass. Pure; the serving tier and the simulator follow the same rules.

A pass has a budget of tokens. Sessions that decode come before those that prefill, each in its turn; a long text is read in
chunks beside them, of a size that lengthens the pass only so far. How many guesses and branches are scored beside the texts,
`cascade.planner.choice` computes.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from cascade.planner.choice import Policy, affordable
from cascade.planner.cost import Profile
from cascade.planner.tuning import MIN_BRANCH_CHANCE, PREFILL_TOKENS
from cascade.session.branches import Branch
from cascade.session.session import Work
from cascade.tier.slot import Slot, U

PRIORITY_S = 10.0  # a step of priority is worth having come so much earlier: so nobody starves
PREFILL_SHARE = 4  # prefills get at least this part of a pass, one over it
MAX_STRETCH = 3.0  # a prefill beside sessions that decode may take so many times their pass

Batch: TypeAlias = list[tuple[Slot[U], Work]]
# the chance to be of use, which of the texts or sessions, and a node of its draft or a branch
Candidate: TypeAlias = tuple[float, int, int | Branch]
BranchCandidates: TypeAlias = Mapping[int, Sequence[tuple[float, Branch]]]  # of sessions, by the identity of their slots


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
    those that still wait for guesses: it costs them less than the next.
    """
    branching = [slot for slot in slots if slot.session.branches is not None]
    branches = {id(slot): found for slot in branching if (found := slot.session.branch_candidates())}
    ready = [
        (_start_at(slot, policy, profile), slot)
        for slot in slots
        if not slot.session.stalled or any(chance >= MIN_BRANCH_CHANCE for chance, _ in branches.get(id(slot), ()))
    ]
    first = min((start_at for start_at, _ in ready), default=None)
    if first is None or first > now:
        return [], first
    prefills = [slot for _, slot in ready if slot.session.num_pending >= PREFILL_TOKENS]
    decodes = [slot for _, slot in ready if slot.session.num_pending < PREFILL_TOKENS]
    reserved = _prefill_budget(prefills, decodes, profile, max_tokens)
    batch = _decode_rows(decodes, branches, max_tokens - reserved, policy.max_guesses, profile)
    left = max_tokens - sum(len(work) for _, work in batch)
    if batch:
        left = min(left, _prefill_limit(profile, max_tokens))
    return batch + _prefill_rows(prefills, left, policy.max_guesses), None


def _start_at(slot: Slot[Any], policy: Policy, profile: Profile) -> float:
    """When a session should be scored with what it has; a time that has passed means now."""
    session, since = slot.session, slot.since
    if not session.drafter or session.prefilling or not session.max_depth:
        return since
    stats = session.guesses.stats
    if stats.interrupted and session.likely_depth < policy.waits_for(stats, session.max_depth):
        return since + policy.patience * profile.pass_s
    return since


def _prefill_limit(profile: Profile, max_tokens: int) -> int:
    """Tokens that may be read beside sessions that decode."""
    if not profile.token_s:
        return max_tokens
    return max(PREFILL_TOKENS, min(max_tokens, int(MAX_STRETCH * profile.pass_s / profile.token_s)))


def _prefill_budget(prefills: Sequence[Slot[U]], decodes: Sequence[Slot[U]], profile: Profile, max_tokens: int) -> int:
    """Tokens of a pass that sessions which decode have to leave."""
    if not prefills or not decodes:
        return max_tokens if prefills else 0
    their_turn = min(map(_turn, prefills)) < min(map(_turn, decodes))  # where a pass is too short to be shared
    share = max_tokens // PREFILL_SHARE or int(their_turn)
    return min(share, _prefill_limit(profile, max_tokens), sum(slot.session.num_pending for slot in prefills))


def _decode_rows(
    slots: Sequence[Slot[U]], branches: BranchCandidates, budget: int, max_guesses: int, profile: Profile
) -> Batch[U]:
    """Everyone's text before anyone's guesses and branches, and those first who wait longest."""
    texts: list[Slot[U]] = []
    own, context, left = 0.0, 0, budget  # tokens that the texts are expected to gain, positions, tokens of the pass
    for slot in sorted(slots, key=_turn):
        session = slot.session
        if not session.stalled and left > 0:
            texts.append(slot)
            own += session.chance
            context += session.kv_len
            left -= session.num_pending
    candidates = _candidates(texts, slots, branches, max_guesses) if left > 0 else []
    sizes = [(chance, len(one.pending) if isinstance(one, Branch) else 1) for chance, _, one in candidates]
    nodes: list[list[int]] = [[] for _ in texts]  # of the draft of each
    branch_rows: Batch[U] = []
    count = affordable(sizes, own, budget - left, budget, profile.turns(budget, context)) if candidates else 0
    for _, place, candidate in candidates[:count]:
        if isinstance(candidate, Branch):
            slot = slots[place]
            branch_rows.append((slot, slot.session.branch_work(candidate)))
        else:
            nodes[place].append(candidate)
    rows: Batch[U] = []
    for slot, chosen in zip(texts, nodes, strict=True):
        chosen.sort()
        rows.append((slot, slot.session.work(budget, chosen)))
        budget -= slot.session.num_pending
    return rows + branch_rows


def _candidates(
    texts: Sequence[Slot[U]], slots: Sequence[Slot[U]], branches: BranchCandidates, max_guesses: int
) -> list[Candidate]:
    """Guesses after the texts and branches beside them: the likeliest first."""
    found: list[Candidate] = []
    for place, slot in enumerate(texts):
        certain = slot.session.chance
        found += [(certain * chance, place, node) for chance, node in slot.session.candidates()[:max_guesses]]
    if branches:
        for place, slot in enumerate(slots):
            found += [(chance, place, branch) for chance, branch in branches.get(id(slot), ())]
    found.sort(key=itemgetter(0), reverse=True)
    return found


def _prefill_rows(slots: Sequence[Slot[U]], budget: int, max_guesses: int) -> Batch[U]:
    """Half of the budget for the first to come, the rest for the shortest texts: neither waits for all of the other."""
    if not slots or budget <= 0:
        return []
    eldest = min(slots, key=rank)
    others = sorted((slot for slot in slots if slot is not eldest), key=lambda slot: (slot.session.num_pending, rank(slot)))
    rest = sum(slot.session.num_pending for slot in others)
    first = max(budget - rest, -(-budget // 2))
    rows: Batch[U] = []
    for slot in (eldest, *others):
        work = slot.session.work(min(first if slot is eldest else budget, slot.session.num_pending + max_guesses))
        budget -= len(work)
        rows.append((slot, work))
        if budget <= 0:
            break
    return rows
