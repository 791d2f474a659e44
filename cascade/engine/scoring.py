"""Packs the rows of a pass into one input of a network, and turns logits into results; for all engines."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from torch import Tensor

from cascade.cpu.cache import Span
from cascade.engine.sampling.own_tokens import Choice, own_tokens_and_next, runner_ups
from cascade.engine.sampling.state import report, shape
from cascade.scorer import Row, Scored

Report = Callable[[Tensor, Sequence[Row], list[Sequence[int]]], None]  # see `cascade.engine.sampling.state.report`


class Packed(NamedTuple):
    """Rows one after another."""

    tokens: list[int]
    positions: list[int]
    keep: list[int]  # indices whose logits are wanted
    spans: list[Span]  # one for each row

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        packed = cls([], [], [], [])
        tokens, positions, keep, spans = packed
        for row in rows:
            begin, start = len(tokens), row.start
            tokens += row.input_ids
            end = len(tokens)
            spans.append(Span(row.cache, begin, end, start))
            positions += range(start, start + end - begin)
            keep += range(end - row.num_scored, end)
        return packed


def unpacked(packed: list[list[int]], rows: Sequence[Row], valid: Sequence[int]) -> Iterator[Scored]:
    """Split ``packed`` ``[1 + 2 * number, sum of num_scored]``, see `with_runner_ups`, into the results of rows.

    Only the first ``valid`` own tokens of each row count.
    """
    begin = 0
    for row, count in zip(rows, valid, strict=True):
        part = slice(begin, begin + count)
        next_ = runner_ups([each[part] for each in packed], row.runner_ups) if row.runner_ups else ()
        yield Scored(packed[0][part], runner_ups=next_)
        begin += row.num_scored


def choices(rows: Sequence[Row]) -> list[Choice]:
    """Parameters, first position and number of the own tokens that each row wants."""
    return [(row.params, row.start + len(row.input_ids) - (number := row.num_scored) + 1, number) for row in rows]


def scored(logits: Tensor, rows: Sequence[Row], on_scored: Report = report) -> list[Scored]:
    """Own tokens of rows whose drafts are lines, from ``logits`` ``[sum of num_scored, V]``.

    ``on_scored`` is called like `report`. The host reads once, and twice more for each row with logprobs.
    """
    shaped, valid = shape(logits, rows)
    number = max((row.runner_ups for row in rows), default=0)
    packed = own_tokens_and_next(shaped, choices(rows), number)
    results = list(unpacked(packed.tolist(), rows, valid))
    on_scored(logits, rows, [result.own for result in results])
    return results
