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
from cascade.native.attention import Heads, Kind, Sizes, attend_step, scratch_of, store_step
from cascade.native.jit import Step
from cascade.native.layers import Rows, add_step, gate_step, norm_step, rotate_step, shift_step
from cascade.native.product import interleave_step
from cascade.native.program import run_all


class Norm(NamedTuple):
    """``x / rms(x) * (offset + weight)``, see `cascade.native.layers.rms_norm`."""

    weight: Tensor
    epsilon: float
    offset: float


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


class WholeLayer:
    """The forward of ``module``, whose attention is ``attention``. Passes of another kind go step by step, as before."""

    def __init__(self, module: nn.Module, attention: Any, parts: Parts) -> None:
        self._module = module
        self._attention = attention
        self._parts = parts

    def __call__(self, hidden_states: Tensor, *others: Any, **options: Any) -> Tensor:
        planned, angles = options.get("cascade_pass"), options.get("position_embeddings")
        native = self._attention.config._attn_implementation == NATIVE
        if others or not native or not isinstance(planned, NativePass) or angles is None:
            out: Tensor = type(self._module).forward(self._module, hidden_states, *others, **options)
            return out
        cos, sin = (angle[0].contiguous() for angle in angles)
        return self._run(hidden_states[0].contiguous(), cos, sin, planned)[None]

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor, planned: NativePass) -> Tensor:
        """``x`` ``[tokens, hidden]``, angles ``[tokens, turned]``; as many come out."""
        parts, (tokens, hidden), threads = self._parts, x.shape, torch.get_num_threads()
        layer: int = self._attention.layer_idx  # which a head beside the network may have been given since
        sizes, spans, half = parts.sizes, planned.spans[layer], parts.wide.blocks.out_features // 2
        heard, turned = sizes.heads * sizes.value_size, (sizes.heads + sizes.kv_heads) * sizes.key_size
        products = [one.blocks.width for one in (parts.asked, parts.attended, parts.wide, parts.narrow)]
        widths = (hidden, max(hidden, heard, half), turned, hidden, half, *products)
        *places, size = accumulate((tokens * width for width in widths), initial=0)
        scratch = x.new_empty(size + threads * scratch_of(spans, sizes))
        at = [Rows(scratch.data_ptr() + 4 * place, width) for place, width in zip(places, widths, strict=True)]
        normed, mixed, heads, middle, gated, asked, attended, wide, narrow = at
        heard_at, out = x.new_zeros(tokens, heard), torch.empty_like(x)
        weights = sum(one.blocks.blocks.numel() for one in (parts.asked, parts.attended, parts.wide, parts.narrow))
        steps = [
            norm_step(Rows(x.data_ptr(), hidden), normed, x.shape, *parts.before_attention),
            *_times(parts.asked, normed.address, mixed.address, tokens, asked),
            *self._attend(asked, heads, heard_at.data_ptr(), scratch.data_ptr() + 4 * size, (cos, sin), planned),
            *_times(parts.attended, heard_at.data_ptr(), mixed.address, tokens, attended),
            add_step(x.data_ptr(), attended, middle.address, x.shape),
            norm_step(middle, normed, x.shape, *parts.before_mlp),
            *_times(parts.wide, normed.address, mixed.address, tokens, wide),
            gate_step(wide, gated.address, (tokens, half), parts.activation),
            *_times(parts.narrow, gated.address, mixed.address, tokens, narrow),
            add_step(middle.address, narrow, out.data_ptr(), x.shape),
        ]
        run_all(steps, tokens * weights)
        return out

    def _attend(
        self, asked: Rows, normed: Rows, out: int, scratch: int, angles: tuple[Tensor, Tensor], planned: NativePass
    ) -> Iterator[Step]:
        """Attention of queries, keys and values, which lie behind each other; heads that are normed go to ``normed``."""
        parts, (tokens, _), heads, layer = self._parts, angles[0].shape, asked, self._attention.layer_idx
        sizes, spans = parts.sizes, planned.spans[layer]
        queries = sizes.heads * sizes.key_size
        turned = queries + sizes.kv_heads * sizes.key_size
        if parts.head_norms:
            heads = normed
            for norm, begin, end in zip(parts.head_norms, (0, queries), (queries, turned), strict=True):
                yield norm_step(asked.behind(begin), heads.behind(begin), (tokens, end - begin), *norm)
        yield rotate_step(heads, (tokens, turned), sizes.key_size, *angles)
        rows = (heads, heads.behind(queries), asked.behind(turned))
        given = [
            Heads(one.address, size, one.stride)
            for one, size in zip(rows, (sizes.key_size, sizes.key_size, sizes.value_size), strict=True)
        ]
        step = attend_step(given, out, scratch, spans, sizes, Kind(parts.scaling, planned.windows[layer]))
        if torch.get_num_threads() > 1:
            yield store_step(step)
        yield step


def _times(layer: InBlocks, x: int, mixed: int, tokens: int, out: Rows) -> Iterator[Step]:
    """The product of ``tokens`` rows at ``x``, which lie behind each other; they are interleaved at ``mixed``."""
    if tokens > 1:
        yield interleave_step(x, mixed, tokens, layer.blocks.blocks.shape[1])
        x = mixed
    yield layer.blocks.step(x, tokens, out.address)
    if layer.bias is not None:
        yield shift_step(out, tokens, layer.bias)
