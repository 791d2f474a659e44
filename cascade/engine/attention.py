"""How a model holds keys and values and attends to them: one strategy for each kind of device, chosen when it is loaded.

On a CPU a session's keys and values are its own: in float32 our kernel reads them, in 16 bits PyTorch's. On a GPU they lie in
blocks that all sessions share: PyTorch's kernel for rows of different lengths reads them there, by block tables, and where it
cannot, a session's are gathered before each layer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cascade.engine import kv
from cascade.engine.contiguous_cache import Cache
from cascade.engine.kernels import PAGE, Kernel, find_kernel, gather_attention, window_size_of
from cascade.engine.kv import ATTENTION, Pass, Span
from cascade.engine.paged_cache import RESERVED, Blocks, PagedCache
from cascade.engine.survey import Survey
from cascade.native.attention import Kind, Spans
from cascade.native.attention import attend as attend_spans
from cascade.native.attention import store as store_spans
from cascade.native.cache import BlockedCache, Shape, tables

log = logging.getLogger(__name__)

PAGED = "cascade_paged"  # attention functions over blocks, at Transformers
GATHERED = "cascade_gathered"
NATIVE = "cascade_native"
PROBES = 8  # blocks while a model is tried out

Windows = dict[int, int | None]  # by layer, see `cascade.engine.survey.Survey`


class Attention(Protocol):
    """A way to hold keys and values, as `cascade.engine.model.Model` uses it."""

    name: str  # of its attention function, at Transformers
    fills: bool  # passes may be filled up with tokens of no row, see `cascade.engine.model.fill`
    shares_pass: bool  # forks see what their store's row writes before them in the same pass, see `cascade.engine.trees`

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""

    def plan(self, spans: Sequence[Span], windows: Windows) -> Any:
        """What the layers of a pass are given."""

    def write(self, layer: int, key: Tensor, value: Tensor, planned: Any) -> None:
        """Put keys and values ``[1, kv_heads, total_tokens, head_dim]`` where the pass has its rows, for later ones to see."""

    def hold(self, tokens: int) -> int:
        """Make the memory for so many positions, once every layer was seen; how many they are in whole blocks."""


class Contiguous:
    """Each session by itself, see `cascade.engine.kv`."""

    name = ATTENTION
    fills = True
    shares_pass = True

    def new_cache(self) -> Cache:
        return Cache()

    def plan(self, spans: Sequence[Span], windows: Windows) -> Pass:
        return Pass(spans, windows)

    def write(self, layer: int, key: Tensor, value: Tensor, planned: Pass) -> None:
        for _, span in planned.in_order:
            span.cache.write(layer, span.start, *(kv.finite(part[0, :, span.begin : span.end]) for part in (key, value)))

    def hold(self, tokens: int) -> int:
        return tokens


@dataclass(slots=True)
class NativePass:
    """What `attend_native` needs, for all layers of a pass."""

    spans: dict[int, Spans]  # by layer
    windows: Windows


class Native:
    """Each session by itself, in the order that suits our own kernel, which takes float32 on a CPU."""

    name = NATIVE
    fills = True
    shares_pass = True

    def __init__(self, found: Survey, dtype: torch.dtype) -> None:
        """``dtype`` is that of keys and values as they are held, float32 or bfloat16."""
        self._dtype = dtype
        self._shapes = {layer: Shape(*heads[1:]) for layer, heads in found.heads.items()}
        self._shapes |= {layer: Shape(1, 0, width) for layer, width in found.kept.items()}

    def new_cache(self) -> BlockedCache:
        return BlockedCache(self._shapes, self._dtype)

    def plan(self, spans: Sequence[Span], windows: Windows) -> NativePass:
        rows = [(span.cache, span.begin, span.end - span.begin, span.start) for span in spans]
        return NativePass(tables(rows, self._shapes), windows)  # type: ignore[arg-type]

    def write(self, layer: int, key: Tensor, value: Tensor, planned: NativePass) -> None:
        store_spans(_dense(key), _dense(value), planned.spans[layer])

    def hold(self, tokens: int) -> int:
        return tokens


class Paged:
    """Keys and values in blocks. Passes whose rows are equally long can be captured: see `over`."""

    fills = False
    shares_pass = False  # rows over several tables are equal before a kernel: none is written before the others
    most = 0  # tokens of a pass that is worth capturing

    def __init__(self, kernel: Kernel, block: int = PAGE) -> None:
        self.blocks = Blocks(PROBES, block)
        self._kernel = kernel

    def new_cache(self) -> PagedCache:
        return PagedCache(self.blocks)

    def over(self, tables: "BlockTables", windows: Windows) -> "PagedPass":
        """A pass over rows whose blocks are ready to be written; those of `Gathered` must be equally long."""
        return PagedPass(self.blocks, tables, windows, self._kernel)

    def widths(self, most: int) -> tuple[int, ...]:
        """Widths of tables that passes are captured for, in blocks; ``most`` is that of the longest session."""
        return (most,)

    def hold(self, tokens: int) -> int:
        number = max(1, tokens // self.blocks.block)
        self.blocks = self.blocks.resized(number + RESERVED)
        return number * self.blocks.block


@dataclass(slots=True)
class BlockTables:
    """The rows of one pass as the kernel wants them. Query ``i`` of a row's ``n`` sees ``length - n + i + 1`` positions."""

    slot_mapping: Tensor  # int64 [total_tokens], where keys and values are written among the positions of all blocks
    ends: Tensor  # int32 [rows + 1], from 0 on: tokens before the end of each row
    lengths: Tensor  # int32 [rows], positions in use, this pass's included
    blocks: Tensor  # int32 [rows, width]
    longest: int  # row, in tokens
    farthest: int  # length, at most


@dataclass(slots=True)
class PagedPass:
    """What `attend` needs, for all layers of a pass."""

    memory: Blocks
    tables: BlockTables
    windows: Windows
    kernel: Kernel


class Gathered(Paged):
    """Gathers a session's blocks for every layer: works with all kinds of layers, on any device."""

    name = GATHERED
    most = 32

    def __init__(self, block: int = PAGE) -> None:
        super().__init__(gather_attention, block)

    def plan(self, spans: Sequence[Span], windows: Windows) -> Pass:
        return Pass(spans, windows)

    def write(self, layer: int, key: Tensor, value: Tensor, planned: Pass) -> None:
        slots: list[int] = []
        for span in planned.spans:
            cache, end = span.cache, span.start + span.end - span.begin
            assert isinstance(cache, PagedCache)
            cache.prepare(span.start, end)
            slots += cache.slot_mapping(span.start, end)
        self.blocks.write(layer, torch.tensor(slots).to(key.device, non_blocking=True), key[0], value[0])

    def widths(self, most: int) -> tuple[int, ...]:
        return (*(4**power for power in range(most.bit_length()) if 4**power < most), most)


class Varlen(Paged):
    """Lets ``kernel`` read blocks in place."""

    name = PAGED
    most = 256

    def __init__(self, kernel: Kernel, device: torch.device, block: int = PAGE) -> None:
        super().__init__(kernel, block)
        self._device = device

    def plan(self, spans: Sequence[Span], windows: Windows) -> PagedPass:
        slots: list[int] = []
        ends, lengths, tables = [0], [], []
        for span in spans:
            cache = span.cache
            assert isinstance(cache, PagedCache)
            length = span.start + span.end - span.begin
            cache.prepare(span.start, length)
            slots += cache.slot_mapping(span.start, length)
            ends.append(span.end)
            lengths.append(length)
            tables.append(cache.table[: -(-length // self.blocks.block)])
        width = max(map(len, tables))
        flat = [block for table in tables for block in (*table, *[0] * (width - len(table)))]
        packed = torch.tensor(slots + ends + lengths + flat).to(self._device, non_blocking=True)
        where, *rest = packed.split([len(slots), len(ends), len(lengths), len(flat)])
        cut, used, blocks = (part.int() for part in rest)
        longest = max(span.end - span.begin for span in spans)
        tables_ = BlockTables(where, cut, used, blocks.view(len(spans), width), longest, max(lengths))
        return self.over(tables_, windows)

    def write(self, layer: int, key: Tensor, value: Tensor, planned: PagedPass) -> None:
        self.blocks.write(layer, planned.tables.slot_mapping, key[0], value[0])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cascade_pass: PagedPass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed pass over blocks, for `transformers.AttentionInterface`; shapes as of `kv.attend`."""
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer: int = module.layer_idx  # type: ignore[assignment]
    tables, window = cascade_pass.tables, cascade_pass.windows[layer]
    held = cascade_pass.memory.write(layer, tables.slot_mapping, key[0], value[0])
    # PyTorch's kernel is not chosen for layers that have these, see `takes`
    special = {} if softcap is None and s_aux is None else {"softcap": softcap, "sinks": s_aux}
    out = cascade_pass.kernel(
        query[0].transpose(0, 1),
        *held,
        tables.ends,
        None,
        tables.longest,
        tables.farthest,
        scale=scaling,
        window_size=window_size_of(window, tables.longest),
        enable_gqa=query.shape[1] != key.shape[1],
        seqused_k=tables.lengths,
        block_table=tables.blocks,
        **special,
    )
    return out.contiguous()[None], None  # some models view it as it is


def attend_native(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cascade_pass: NativePass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed pass in float32 on a CPU; shapes as of `kv.attend`."""
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    kind = Kind(scale, cascade_pass.windows[layer], softcap, None if s_aux is None else s_aux.contiguous())
    out = attend_spans(_dense(query), _dense(key), _dense(value), cascade_pass.spans[layer], kind)
    return out.view(1, query.shape[2], query.shape[1], value.shape[3]), None


def _dense(part: Tensor) -> Tensor:
    """``[heads, total_tokens, head_dim]`` with the numbers of a head behind each other."""
    return part[0] if part.stride(3) == 1 else part[0].contiguous()


def attend_gathered(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cascade_pass: Pass | PagedPass | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention that gathers a session's blocks: row by row, or for all rows at once in a pass that is captured."""
    way = attend if isinstance(cascade_pass, PagedPass) else kv.attend
    return way(module, query, key, value, attention_mask, cascade_pass=cascade_pass, **options)  # type: ignore[arg-type]


AttentionInterface.register(PAGED, attend)
AttentionInterface.register(GATHERED, attend_gathered)
AttentionInterface.register(NATIVE, attend_native)


def choose_attention(device: torch.device, dtype: torch.dtype, found: Survey, *, wide: bool = False) -> Attention:
    """The best strategy on ``device`` for a model of ``dtype`` with the layers that were found.

    For a ``wide`` one, see `cascade.engine.wide`, ``dtype`` is that of its weights.
    """
    if device.type != "cuda":
        return Native(found, dtype) if wide or dtype is torch.float32 else Contiguous()
    kernel = find_kernel(device, dtype, found)
    if kernel is None:
        log.warning("PyTorch %s has no kernel for this model on %s: keys and values are gathered", torch.__version__, device)
        return Gathered()
    return Varlen(kernel, device)
