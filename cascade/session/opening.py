"""How a session opens the one below that drafts for it."""

from collections.abc import Sequence
from dataclasses import replace

from cascade.messages import Open
from cascade.session.rounds import unended


def below(opening: Open, text: Sequence[int], drafter: str, session: str, chain: tuple[str, ...]) -> Open:
    """What opens the ``session`` of the tier ``drafter``, for the one that ``opening`` began and that has ``text``."""
    params, rules = opening.params, opening.rules.below()
    return replace(
        opening,
        params=replace(params, logprobs=None, prompt_logprobs=None),  # only the full tier's are of use
        session=session,
        tokens=tuple(text),
        tier=drafter,
        chain=chain,
        window=opening.draft_window,
        branches=opening.draft_branches,
        adaptive=False,
        lockstep=opening.lockstep and not opening.rules.independent_noise,
        rules=rules,
        ends=unended(opening, rules),
    )
