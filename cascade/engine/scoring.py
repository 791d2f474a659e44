"""From the logits of a pass to what it says of its rows, whichever engine computed them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from cascade.engine.drawing import drawn
from cascade.engine.logits_processors import report, shape
from cascade.engine.packing import unpacked
from cascade.engine.sampling import Asked, own_tokens, own_tokens_and_next
from cascade.params import SamplingParams
from cascade.scorer import Row, Scored

UNDRAWN = SamplingParams(temperature=0, seed=0)  # of rows whose own tokens are drawn otherwise

Report = Callable[[Tensor, Sequence[Row], list[Sequence[int]]], None]  # see `cascade.engine.logits_processors.report`


def asked(rows: Sequence[Row]) -> list[Asked]:
    """Parameters, first position and number of the own tokens that each row wants."""
    return [
        (row.params if row.draw is None else UNDRAWN, row.start + len(row.input_ids) - row.num_scored + 1, row.num_scored)
        for row in rows
    ]


def scored(logits: Tensor, rows: Sequence[Row], tell: Report = report) -> list[Scored]:
    """Own tokens of rows whose drafts are lines, from ``logits`` ``[sum of num_scored, V]``.

    ``tell`` hears of all that have a state, as `report` does. One host read, and two for each row with logprobs.
    """
    shaped, known = shape(logits, rows)
    number = max((row.runner_ups for row in rows), default=0)
    said = own_tokens_and_next(shaped, asked(rows), number) if number else own_tokens(shaped, asked(rows))[None]
    found = list(unpacked(said.tolist(), rows, known))
    if any(row.draw is not None for row in rows):
        found = drawn(shaped, rows, found)
    tell(logits, rows, [one.own for one in found])
    return found
