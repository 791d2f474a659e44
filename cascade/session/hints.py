"""What drafters inside a tier guess after a text, together with what the tier below does."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from cascade.draft import Draft
from cascade.planner.acceptance import Calibration


class Hint(NamedTuple):
    """A guess of one drafter."""

    drafter: str
    calibration: Calibration  # of its guesses
    draft: Draft


class Pool(NamedTuple):
    """All guesses after a text as one tree, the nodes of the tier below first."""

    draft: Draft
    chances: list[float]  # of each node: that the text goes along its path
    whose: tuple[str, ...] = ()  # of each node, the drafter inside the tier that alone guesses it; empty if there is none


def pooled(draft: Draft, calibration: Calibration, hints: Sequence[Hint]) -> Pool:
    """The union. What several guess has the best of their chances."""
    chances = calibration.chances(draft)
    if not hints:
        return Pool(draft, chances)
    whose = [""] * len(draft)
    for hint in hints:
        draft, places = draft.union(hint.draft)
        for chance, place in zip(hint.calibration.chances(hint.draft), places, strict=True):
            if place < len(chances):
                chances[place] = max(chances[place], chance)
            else:
                chances.append(chance)
                whose.append(hint.drafter)
    return Pool(draft, chances, tuple(whose))


def fed(pool: Pool, room: int, ends: Collection[int]) -> list[tuple[float, int]]:
    """Nodes that a pass can use where there is ``room`` after the text, each with its chance: the likeliest first.

    An ending token is compared but needs no feeding, since nothing comes after it.
    """
    draft, chances, _ = pool
    if not draft or room <= 0:
        return []
    tokens = draft.tokens
    if draft.is_line:
        size = min(len(draft), room)
        size = next((node for node in range(size) if tokens[node] in ends), size)
        return list(zip(chances[:size], range(size), strict=True))
    depths, nodes = draft.depths, {-1}
    for node in range(len(draft)):
        if depths[node] < room and draft.parents[node] in nodes and tokens[node] not in ends:
            nodes.add(node)
    nodes.discard(-1)
    return sorted(((chances[node], node) for node in nodes), key=lambda guess: (-guess[0], guess[1]))
