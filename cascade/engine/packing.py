"""Rows of sessions as one input of a network, and what it says of them as rows again."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from cascade.engine.kv import Span
from cascade.engine.sampling import runner_ups
from cascade.scorer import Row, Scored


class Packed(NamedTuple):
    """Rows one after another."""

    tokens: list[int]
    positions: list[int]
    keep: list[int]  # places whose logits are wanted
    spans: list[Span]  # of each row

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        packed = cls([], [], [], [])
        for row in rows:
            begin, end = len(packed.tokens), len(packed.tokens) + len(row.input_ids)
            packed.spans.append(Span(row.cache, begin, end, row.start))
            packed.tokens.extend(row.input_ids)
            packed.positions.extend(range(row.start, row.start + len(row.input_ids)))
            packed.keep.extend(range(end - row.num_scored, end))
        return packed


def unpacked(said: list[list[int]], rows: Sequence[Row], known: Sequence[int]) -> Iterator[Scored]:
    """What a pass says of each row: of ``said`` ``[1 + 2 * number, sum of num_scored]``, see `with_runner_ups`.

    Of each row ``known`` own tokens count.
    """
    begin = 0
    for row, count in zip(rows, known, strict=True):
        part = slice(begin, begin + count)
        next_ = runner_ups([each[part] for each in said], row.runner_ups) if row.runner_ups else ()
        yield Scored(said[0][part], runner_ups=next_)
        begin += row.num_scored
