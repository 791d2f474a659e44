"""What a session needs besides its text where guesses are accepted by another rule than the coupled one.

Such rules keep the law of the text if the noise of a verifier is independent of that of its drafter, and if nothing that a
drafter has drawn decides whether it is judged. So:

- *Noise is keyed by the text before it*, and by whether such an edge is above. No key is used twice for different draws: what
  is drawn after a correction stands after another text than what was drawn before, for the correction is no guess of the
  verifier's drafter. Tiers below such an edge have the same keys, and may compare their own tokens as all tiers do with
  shared noise. A pass that is repeated, here or on another replica, draws the same.
- *A round is a whole window or nothing.* How many guesses one pass judges is what fits window and limit, however likely they
  are; guesses that are not all there are not judged. An ending token is judged as any other. A drafter goes on after it: a
  round that came sooner for its end might be judged where another one comes too late.
"""

from array import array
from collections.abc import Sequence

from cascade.draft import Dist, Draft
from cascade.messages import Open, Rules
from cascade.scorer import Draw, Scored
from cascade.session.guesses import Pool
from cascade.session.work import Work
from cascade.splitmix import GOLDEN, mix, signed


def stops_below(opening: Open, below: Rules) -> frozenset[int]:
    """Ending tokens after which the tier below writes nothing: none in rounds, but where what follows could not be shaped."""
    shaped = opening.params.structured is not None or opening.params.min_tokens
    return frozenset() if below.wants_q and not shaped else opening.ends


class Rounds:
    """Keys of the session that ``opening`` began and whose text is ``text``, and what its own tokens were drawn from."""

    def __init__(self, opening: Open, text: Sequence[int]) -> None:
        assert opening.params.seed is not None
        self._rules: Rules = opening.rules
        self._ends = opening.ends
        self.stops = stops_below(opening, opening.rules.below())  # tokens after which the tier below writes nothing
        self._prompt_len = opening.prompt_len
        self._text = text
        self._keys = array("q", [first_key(opening.params.seed, opening.rules.hop)])  # at positions from the prompt's end on
        self._dists: dict[int, Dist] = {}  # by position

    def draw(self, work: Work) -> Draw | None:
        """How the own tokens of a row are drawn, if it has any."""
        if not work.num_own:
            return None
        known, text = self._keys, self._text
        for position in range(self._prompt_len + len(known) - 1, len(text)):
            known.append(next_key(known[-1], text[position]))
        rules, keys = self._rules, [known[len(text) - self._prompt_len]]
        for token in work.draft.tokens:
            keys.append(next_key(keys[-1], token))
        return Draw(keys, rules.rule, rules.draft_top_k if rules.wants_q else None)

    def candidates(self, pool: Pool, depth: int, *, whole: bool) -> list[tuple[float, int]]:
        """Guesses that the next row has judged, each with its chance; ``whole`` if all of a round are here.

        They are a line, up to an ending token, which is one of them.
        """
        draft, chances, _ = pool
        if depth <= 0 or (draft.dists and not whole):
            return []
        tokens = draft.trunk.tokens[:depth]
        size = next((place for place, token in enumerate(tokens, start=1) if token in self._ends), len(tokens))
        return list(zip(chances[:size], range(size), strict=True))

    def advance(self, start: int, draft: Draft, scored: Scored) -> None:
        """A pass has said how the text goes on from position ``start`` on."""
        new, _ = draft.walk(scored.own, self._ends)
        if scored.dists:
            self._dists.update((start + place, scored.dists[place]) for place in range(len(new)))

    def cut(self, position: int) -> None:
        """The text goes on otherwise from ``position`` on."""
        del self._keys[max(0, position - self._prompt_len) + 1 :]
        self._keep_dists(0, position)

    def proposal(self, start: int, tokens: Sequence[int], origins: bytes) -> Draft:
        """``tokens`` of the text from ``start`` on, as the tier above is sent them:
        with what each was drawn from, if that tier asks for it and the model says it.
        """
        size = len(tokens)
        self._keep_dists(start, start + size)
        dists = tuple(self._dists.values()) if self._rules.wants_q and len(self._dists) == size else ()
        return Draft(tuple(tokens), origins, dists=dists)

    def _keep_dists(self, start: int, end: int) -> None:
        """Forget all but positions from ``start`` to before ``end``."""
        self._dists = {place: dist for place, dist in self._dists.items() if start <= place < end}


def first_key(seed: int, hop: int) -> int:
    """Of the noise after the prompt."""
    return signed(mix(mix(seed) ^ (hop + 1) * GOLDEN))


def next_key(key: int, token: int) -> int:
    return signed(mix(key + (token + 1) * GOLDEN))
