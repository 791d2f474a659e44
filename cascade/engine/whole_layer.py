"""A decoder layer in one call: the kernels of its lean parts in their order, and so their bits, without Python in between.

In a pass of a small model on a CPU what lies between kernels takes longer than these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cascade.engine.attention import NATIVE, NativePass
from cascade.engine.packed_linear import InBlocks
from cascade.native.attention import Heads, Kind, Sizes, Spans, attend_step, scratch_of, store_step
from cascade.native.jit import Step
from cascade.native.layers import Rows, add_step, gate_step, norm_step, rotate_step, shift_step
from cascade.native.program import Program


class Norm(NamedTuple):
    """``x / rms(x) * (offset + weight)``, see `cascade.native.layers.rms_norm`."""

    weight: Tensor
    epsilon: float
    offset: float


class Angles(NamedTuple):
    """By which heads are turned, ``[tokens, turned]`` float32 without gaps."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Desk:
    """Where a layer works on some tokens. Nothing is kept from one layer to the next."""

    heard: Rows  # what attention gives; rows that it leaves out must be numbers
    normed: Rows
    mixed: Rows  # in the order of a product
    heads: Rows
    middle: Rows
    gated: Rows
    asked: Rows
    attended: Rows
    wide: Rows
    narrow: Rows


@dataclass(frozen=True, slots=True)
class Parts:
    """What a layer is made of."""

    before_attention: Norm
    asked: InBlocks  # queries, keys and values
    head_norms: Sequence[Norm]  # of queries and of keys, if there are any
    sizes: Sizes
    scaling: float
    attended: InBlocks
    before_mlp: Norm
    wide: InBlocks  # gate and up
    activation: int
    narrow: InBlocks

    @property
    def products(self) -> tuple[InBlocks, ...]:
        return self.asked, self.attended, self.wide, self.narrow

    @property
    def weights(self) -> int:
        """Numbers of its matrices."""
        return sum(one.blocks.blocks.numel() for one in self.products)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers that each place of a desk has for a token."""
        hidden, half, sizes = self.before_attention.weight.shape[0], self.wide.blocks.out_features // 2, self.sizes
        heard, turned = sizes.heads * sizes.value_size, (sizes.heads + sizes.kv_heads) * sizes.key_size
        products = (one.blocks.width for one in self.products)
        return heard, hidden, max(hidden, heard, half), turned, hidden, half, *products

    def desk(self, address: int, tokens: int) -> Desk:
        """The memory from ``address`` on, of ``tokens`` times the sum of `widths` numbers, for ``tokens``."""
        places = accumulate((4 * tokens * width for width in self.widths[:-1]), initial=address)
        return Desk(*map(Rows, places, self.widths))

    def steps(self, x: int, out: int, tokens: int, desk: Desk, attend: Sequence[Step]) -> Iterator[Step]:
        """From ``[tokens, hidden]`` at ``x`` to as many at ``out``, which may be the same; ``attend`` is of `attention`."""
        hidden, half = desk.middle.stride, desk.gated.stride
        shape = (tokens, hidden)
        yield norm_step(Rows(x, hidden), desk.normed, shape, *self.before_attention)
        yield from _times(self.asked, desk.normed.address, desk.mixed.address, tokens, desk.asked)
        yield from attend
        yield from _times(self.attended, desk.heard.address, desk.mixed.address, tokens, desk.attended)
        yield add_step(x, desk.attended, desk.middle.address, shape)
        yield norm_step(desk.middle, desk.normed, shape, *self.before_mlp)
        yield from _times(self.wide, desk.normed.address, desk.mixed.address, tokens, desk.wide)
        yield gate_step(desk.wide, desk.gated.address, (tokens, half), self.activation)
        yield from _times(self.narrow, desk.gated.address, desk.mixed.address, tokens, desk.narrow)
        yield add_step(desk.middle.address, desk.narrow, out, shape)

    def attention(self, desk: Desk, scratch: int, angles: Angles, spans: Spans, window: int | None) -> Iterator[Step]:
        """Of queries, keys and values, which lie behind each other on the desk."""
        sizes, tokens, heads = self.sizes, len(angles.cos), desk.asked
        queries = sizes.heads * sizes.key_size
        turned = queries + sizes.kv_heads * sizes.key_size
        if self.head_norms:
            heads = desk.heads
            for norm, begin, end in zip(self.head_norms, (0, queries), (queries, turned), strict=True):
                yield norm_step(desk.asked.behind(begin), heads.behind(begin), (tokens, end - begin), *norm)
        yield rotate_step(heads, (tokens, turned), sizes.key_size, *angles)
        rows = (heads, heads.behind(queries), desk.asked.behind(turned))
        given = [
            Heads(one.address, size, one.stride)
            for one, size in zip(rows, (sizes.key_size, sizes.key_size, sizes.value_size), strict=True)
        ]
        step = attend_step(given, desk.heard.address, scratch, spans, sizes, Kind(self.scaling, window))
        if torch.get_num_threads() > 1:
            yield store_step(step)
        yield step


class WholeLayer:
    """The forward of ``module``, whose attention is ``attention``. Passes of another kind go step by step, as before."""

    def __init__(self, module: nn.Module, attention: Any, parts: Parts) -> None:
        self.module = module
        self.attention = attention
        self.parts = parts

    def __call__(self, hidden_states: Tensor, *others: Any, **options: Any) -> Tensor:
        planned, angles = options.get("cascade_pass"), options.get("position_embeddings")
        if others or not self.native or not isinstance(planned, NativePass) or angles is None:
            out: Tensor = type(self.module).forward(self.module, hidden_states, *others, **options)
            return out
        dense = Angles(*(angle[0].contiguous() for angle in angles))
        return self._run(hidden_states[0].contiguous(), dense, planned)[None]

    @property
    def native(self) -> bool:
        """Whether our own kernel attends."""
        return bool(self.attention.config._attn_implementation == NATIVE)

    @property
    def number(self) -> int:
        """The layer's, which a head beside the network may have given it since."""
        return int(self.attention.layer_idx)

    def _run(self, x: Tensor, angles: Angles, planned: NativePass) -> Tensor:
        """``x`` ``[tokens, hidden]``; as many come out."""
        parts, tokens, spans = self.parts, len(x), planned.spans[self.number]
        size = tokens * sum(parts.widths)
        memory = x.new_empty(size + torch.get_num_threads() * scratch_of(spans, parts.sizes))
        memory[: tokens * parts.widths[0]] = 0  # what attention leaves out
        desk, out = parts.desk(memory.data_ptr(), tokens), torch.empty_like(x)
        attend = parts.attention(desk, memory.data_ptr() + 4 * size, angles, spans, planned.windows[self.number])
        steps = list(parts.steps(x.data_ptr(), out.data_ptr(), tokens, desk, list(attend)))
        Program(steps, tokens * parts.weights).run()
        return out


def _times(layer: InBlocks, x: int, mixed: int, tokens: int, out: Rows) -> Iterator[Step]:
    """The product of ``tokens`` rows at ``x``, which lie behind each other; they are put in its order at ``mixed``."""
    yield from layer.blocks.steps(x, mixed, tokens, out.address)
    if layer.bias is not None:
        yield shift_step(out, tokens, layer.bias)
