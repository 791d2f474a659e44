"""Which of its layers a model drafts with for itself: those that are named, or those of a few choices that pay best."""

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from cascade.engine.checkpoint import reason
from cascade.engine.heads.exit import Exit
from cascade.engine.heads.probe import agreement_on, written
from cascade.errors import ModelError
from cascade.planner.choice import speedup

if TYPE_CHECKING:
    from cascade.engine.model import Model

log = logging.getLogger(__name__)

REFUSALS = (RuntimeError, TypeError, AttributeError, LookupError, ValueError)  # of networks that do not run in part


def select(model: "Model", layers: int | None = None, skip: Collection[int] = ()) -> float:
    """Let the head of ``model``, an `Exit`, run the first ``layers``, or all but ``skip``, or else what pays best.

    That is tried on a text that the model writes, with guesses after each of its tokens, of the layers alone. Returns the
    share that is right; raises `ModelError` if the model has no such layers or does not run in part.
    """
    assert model.reader is not None
    head = model.reader.head
    assert isinstance(head, Exit)
    choices = _choices(head.num_layers, layers, skip)
    text = written(model)
    found: dict[frozenset[int], tuple[float, float]] = {}  # speed over the model alone, and the share that is right
    for choice in choices:
        head.skip(choice)
        try:
            right = agreement_on(model, text)
        except REFUSALS as error:
            raise ModelError(f"The drafter 'exit' cannot be used: the model does not run in part ({reason(error)})") from error
        found[head.skipped] = speedup(right, head.cost), right
    best = max(found, key=found.__getitem__)
    head.skip(best)
    gain, right = found[best]
    run = ", ".join(str(layer) for layer in range(head.num_layers) if layer not in best)
    level = logging.INFO if gain > 1 else logging.WARNING
    log.log(level, "Drafting with layers %s: %.0f %% of the guesses are right, at %.2f of a pass", run, 100 * right, head.cost)
    return right


def _choices(number: int, layers: int | None, skip: Collection[int]) -> Sequence[Collection[int]]:
    """Layers to skip."""
    if layers is not None:
        if layers >= number:
            raise ModelError(f"drafter.layers is {layers}, but the model has {number} layers: name fewer")
        return [range(layers, number)]
    if skip:
        if max(skip) >= number:
            raise ModelError(f"drafter.skip names layer {max(skip)}, but those of the model are 0 to {number - 1}")
        if len(skip) == number:
            raise ModelError(f"drafter.skip names all {number} layers: leave one")
        return [skip]
    if number < 2:
        raise ModelError("The drafter 'exit' cannot be used: the model has one layer, and nothing is left without it")
    return candidates(number)


def candidates(number: int) -> list[range]:
    """The end, a piece of the middle, or every other layer: what skipping was found to harm least."""
    exits = {max(1, number // part) for part in (8, 4, 3, 2)} | {number - max(1, number // part) for part in (3, 4)}
    pieces = [
        range(number // 4, number // 2),
        range(number // 2, 3 * number // 4),
        range(number // 2, number - 1),
        range(number // 4, 3 * number // 4),
        range(1, number - 1, 2),
        range(number // 4, number - 1, 2),
    ]
    every = [*(range(first, number) for first in sorted(exits)), *pieces]
    return [one for one in dict.fromkeys(every) if 0 < len(one) < number]
