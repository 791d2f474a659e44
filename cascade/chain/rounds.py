"""What a session knows beside its text where guesses are accepted by another rule than the coupled one.

Such rules keep the law of the text if the noise of a verifier is independent of that of its drafter, and if nothing that a
drafter has drawn decides whether it is judged. So:

- *Noise is keyed by the text before it*, and by whether such an edge is above. No key is used twice for different draws: what
  is drawn behind a correction stands behind another text than what was drawn before, for the correction is no guess of the
  verifier's drafter. Tiers below such an edge have the same keys, and may compare their own tokens as all tiers do with
  shared noise. A pass that is repeated, here or on another replica, draws the same.
- *A round is a whole window or nothing.* How many guesses one pass judges is what fits window and limit, however likely they
  are; guesses that are not all there are not judged. An ending token is judged as any other. A drafter goes on behind it: a
  round that came sooner for its end might be judged where another one comes too late.
- *What a tree offers says nothing of itself.* Beside the line that it has drawn, a drafter offers siblings of its tokens, drawn
  without replacement. Whether one is offered depends on what was drawn before it, and on what stands in other branches: neither
  says anything about its token if those before it are rejected.
"""

from array import array
from collections.abc import Sequence

from cascade.chain.hints import Pool
from cascade.chain.work import Work
from cascade.draft import Dist, Draft
from cascade.messages import RUNNER_UPS, Open, Rules, origin
from cascade.params import TREED
from cascade.scorer import Draw, Scored, Sibling

MAX_NODES = 64  # of a round
LEAST_OFFERED = 0.02  # chance to be judged below which a sibling is not worth a place in the pass above
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def unended(opening: Open, below: Rules) -> frozenset[int]:
    """Ending tokens that the session below stops at: none in rounds, but where what comes behind them could not be shaped."""
    shaped = opening.params.structured is not None or opening.params.min_tokens
    return frozenset() if below.told and not shaped else opening.ends


class Rounds:
    """Keys of the session that ``opening`` began and whose text is ``text``, and what its own tokens were drawn from."""

    __slots__ = ("_branches", "_dists", "_ends", "_keys", "_prompt_len", "_rules", "_siblings", "_text", "stops")

    def __init__(self, opening: Open, text: Sequence[int]) -> None:
        assert opening.params.seed is not None
        self._rules: Rules = opening.rules
        self._ends = opening.ends
        self.stops = unended(opening, opening.rules.below())  # tokens behind which the tier below writes nothing
        self._prompt_len = opening.prompt_len
        self._text = text
        self._keys = array("q", [_first(opening.params.seed, opening.rules.hop)])  # of positions from the prompt's end on
        self._dists: dict[int, Dist] = {}  # by position
        self._siblings: dict[int, Sequence[Sibling]] = {}  # the same
        self._branches = opening.branches if opening.rules.above in TREED else 0

    @classmethod
    def of(cls, opening: Open, text: Sequence[int]) -> "Rounds | None":
        """None where all noise is shared."""
        return cls(opening, text) if opening.rules.keyed else None

    def draw(self, work: Work) -> Draw | None:
        """How the own tokens of a row are drawn, if it has any."""
        if not work.num_own:
            return None
        rules, keys, draft = self._rules, [self._key(len(self._text))], work.draft
        for node, token in enumerate(draft.tokens):
            keys.append(_next(keys[1 + draft.parent(node)], token))
        return Draw(keys, rules.rule, rules.likeliest if rules.told else None, RUNNER_UPS if self._branches else 0)

    def guesses(self, pool: Pool, room: int, *, whole: bool) -> list[tuple[float, int]]:
        """Guesses that the next row has judged, each with its chance; ``whole`` if all of a round are here.

        They are a line, up to an ending token, which is one of them; then the siblings beside it, if it was drawn with some.
        """
        draft, chances, _ = pool
        if room <= 0 or (draft.dists and not whole):
            return []
        trunk = draft.trunk.tokens
        tokens = trunk[:room]
        size = next((place for place, token in enumerate(tokens, start=1) if token in self._ends), len(tokens))
        beside = range(len(trunk), len(draft)) if draft.dists else ()
        nodes = [*range(size), *(node for node in beside if draft.parents[node] < size - 1)]
        return [(chances[node], node) for node in nodes]

    def judged(self, start: int, draft: Draft, scored: Scored) -> None:
        """A pass has said how the text goes on from position ``start`` on."""
        new, path = draft.walk(scored.own, self._ends)
        for place, at in enumerate((-1, *path)[: len(new)]):
            if scored.dists:
                self._dists[start + place] = scored.dists[1 + at]
            if scored.siblings:
                self._siblings[start + place] = scored.siblings[1 + at]

    def cut(self, position: int) -> None:
        """The text goes on otherwise from ``position`` on."""
        del self._keys[max(0, position - self._prompt_len) + 1 :]
        self._forget(0, position)

    def proposed(self, start: int, tokens: Sequence[int], origins: bytes, level: int) -> Draft:
        """``tokens`` of the text from ``start`` on, as the tier above is told them.

        With what each was drawn from, if that tier asks for it and the model says it, and with siblings, where it takes trees.
        """
        size = len(tokens)
        self._forget(start, start + size)
        dists = tuple(self._dists.values()) if self._rules.told and len(self._dists) == size else ()
        line = Draft(tuple(tokens), origins, dists=dists)
        room = min(self._branches, MAX_NODES - size)
        return self._with_siblings(line, start, level, room) if dists and room > 0 else line

    def _with_siblings(self, line: Draft, start: int, level: int, room: int) -> Draft:
        """``line`` and at most ``room`` siblings of its tokens: those that are likeliest to be judged."""
        beside = [self._siblings.get(start + place, ()) for place in range(len(line))]
        heads = sorted(offered(beside), reverse=True, key=lambda head: head[0])[:room]
        found = sorted((place, rank) for _, place, rank in heads)
        return Draft(
            (*line.tokens, *(beside[place][rank].token for place, rank in found)),
            line.origins + bytes([origin(level, corrected=False)]) * len(found),
            parents=(*range(-1, len(line) - 1), *(place - 1 for place, _ in found)),
            dists=(*line.dists, *(line.dists[place] for place, _ in found)),
        )

    def _forget(self, start: int, end: int) -> None:
        """All but positions from ``start`` to before ``end``."""
        self._dists = {place: dist for place, dist in self._dists.items() if start <= place < end}
        self._siblings = {place: one for place, one in self._siblings.items() if start <= place < end}

    def _key(self, position: int) -> int:
        """Of the noise at ``position``, behind the text before it."""
        keys, first = self._keys, self._prompt_len
        for place in range(first + len(keys) - 1, position):
            keys.append(_next(keys[-1], self._text[place]))
        return keys[position - first]


def offered(beside: Sequence[Sequence[Sibling]]) -> list[tuple[float, int, int]]:
    """Chance, place and rank of the siblings ``beside`` each token of a line that may be worth a place in a pass.

    The chance is that of a drafter who is always right: that the line is so up to its place, and there it is a token that is
    left. It falls with the rank, so that none is offered without those before it, whatever it is.
    """
    found, reach = [], 1.0
    for place, siblings in enumerate(beside):
        found += [(reach * one.left, place, rank) for rank, one in enumerate(siblings) if reach * one.left >= LEAST_OFFERED]
        reach *= 1 - siblings[0].left if siblings else 1.0
    return found


def _first(seed: int, hop: int) -> int:
    """The key behind the prompt."""
    return _signed(_mix(_mix(seed) ^ (hop + 1) * _GOLDEN))


def _next(key: int, token: int) -> int:
    """The key behind ``token``."""
    return _signed(_mix(key + (token + 1) * _GOLDEN))


def _mix(z: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    z &= _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z
