"""How a session opens the one below that drafts for it."""

from collections.abc import Sequence
from dataclasses import replace

from cascade.chain.rounds import unended
from cascade.messages import Open
from cascade.params import TREED


def below(opening: Open, text: Sequence[int], drafter: str, session: str, chain: tuple[str, ...], branches: int) -> Open:
    """The message that opens the ``session`` of the tier ``drafter``, for the one that ``opening`` began and that has ``text``.

    It and the tiers of ``chain`` may offer and prepare so many ``branches``; in rounds those below a rule that judges trees.
    """
    params, rules, in_rounds = opening.params, opening.rules.below(), opening.rules.keyed
    judged = not in_rounds or rules.rule in TREED
    return replace(
        opening,
        params=replace(params, logprobs=None, prompt_logprobs=None),  # only the full tier's are of use
        session=session,
        tokens=tuple(text),
        tier=drafter,
        chain=chain,
        window=opening.draft_window,
        branches=branches,
        draft_branches=branches if judged else 0,
        adaptive=False,
        lockstep=rules.rule != "coupled" if in_rounds else opening.lockstep,
        rules=rules,
        ends=unended(opening, rules),
    )
