"""How a model holds keys and values and attends to them: one strategy for each kind of device, chosen when it is loaded.

On a CPU a session's keys and values are contiguous. On a GPU they lie in blocks: PyTorch's kernel for rows of different
lengths reads them there, by block tables, and where it cannot, a session's are gathered before each layer.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from cascade import kv
from cascade.kv import ATTENTION, Cache, Pass, Span, Survey
from cascade.paged import SPARE, Blocks, PagedCache

log = logging.getLogger(__name__)

PAGED = "cascade_paged"  # attention functions over blocks, at Transformers
GATHERED = "cascade_gathered"
PAGE = 256  # positions of a block: the kernel of PyTorch takes multiples of these alone
PROBES = 8  # blocks while a model is tried out
LARGEST_HEAD = 256  # that the kernel takes, in multiples of 8
TOLERANCE = 0.02  # of what the kernel says in 16 bits

Kernel = Callable[..., Any]  # as `torch.nn.attention.varlen.varlen_attn`
Windows = dict[int, int | None]  # by layer, see `cascade.kv.Survey`


class Attention(Protocol):
    """What a model asks of it."""

    name: str  # of its attention function, at Transformers

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""

    def plan(self, spans: Sequence[Span], windows: Windows) -> Any:
        """What the layers of a pass are given."""

    def hold(self, tokens: int) -> int:
        """Make the memory for so many positions, once every layer was seen; how many they are in whole blocks."""


class Contiguous:
    """Each session by itself, see `cascade.kv`."""

    name = ATTENTION

    def new_cache(self) -> Cache:
        return Cache()

    def plan(self, spans: Sequence[Span], windows: Windows) -> Pass:
        return Pass(spans, windows)

    def hold(self, tokens: int) -> int:
        return tokens


class Paged:
    """In blocks. Passes whose rows are equally long can be captured: see `over`."""

    most = 0  # tokens of a pass that is worth capturing

    def __init__(self, kernel: Kernel, block: int = PAGE) -> None:
        self.blocks = Blocks(PROBES, block)
        self._kernel = kernel

    def new_cache(self) -> PagedCache:
        return PagedCache(self.blocks)

    def over(self, tables: "Tables", windows: Windows) -> "PagedPass":
        """A pass over rows whose blocks are ready to be written; those of `Gathered` must be equally long."""
        return PagedPass(self.blocks, tables, windows, self._kernel)

    def widths(self, most: int) -> tuple[int, ...]:
        """How wide tables are told to be, in blocks, for sessions of up to ``most``."""
        return (most,)

    def hold(self, tokens: int) -> int:
        number = max(1, tokens // self.blocks.block)
        self.blocks = self.blocks.resized(number + SPARE)
        return number * self.blocks.block


@dataclass(slots=True)
class Tables:
    """The rows of one pass as the kernel wants them. Query ``i`` of a row's ``n`` sees ``length - n + i + 1`` positions."""

    slots: Tensor  # int64 [total_tokens], where keys and values are written among the positions of all blocks
    ends: Tensor  # int32 [rows + 1], from 0 on: tokens before the end of each row
    lengths: Tensor  # int32 [rows], positions in use, this pass's included
    blocks: Tensor  # int32 [rows, width]
    longest: int  # row, in tokens
    farthest: int  # length, at most


@dataclass(slots=True)
class PagedPass:
    """What `attend` needs, for all layers of a pass."""

    memory: Blocks
    tables: Tables
    windows: Windows
    kernel: Kernel


class Gathered(Paged):
    """A session's blocks are gathered for every layer: for all kinds of layers, on any device."""

    name = GATHERED
    most = 32

    def __init__(self, block: int = PAGE) -> None:
        super().__init__(padded, block)

    def plan(self, spans: Sequence[Span], windows: Windows) -> Pass:
        return Pass(spans, windows)

    def widths(self, most: int) -> tuple[int, ...]:
        return (*(4**power for power in range(most.bit_length()) if 4**power < most), most)


class Varlen(Paged):
    """``kernel`` reads blocks in place."""

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
            slots += cache.slots(span.start, length)
            ends.append(span.end)
            lengths.append(length)
            tables.append(cache.table[: -(-length // self.blocks.block)])
        width = max(map(len, tables))
        flat = [block for table in tables for block in (*table, *[0] * (width - len(table)))]
        packed = torch.tensor(slots + ends + lengths + flat).to(self._device, non_blocking=True)
        where, *rest = packed.split([len(slots), len(ends), len(lengths), len(flat)])
        cut, used, blocks = (part.int() for part in rest)
        longest = max(span.end - span.begin for span in spans)
        tables_ = Tables(where, cut, used, blocks.view(len(spans), width), longest, max(lengths))
        return self.over(tables_, windows)


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
    """Attention of a packed pass over blocks, for `transformers.AttentionInterface`; shapes as of `cascade.kv.attend`."""
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer: int = module.layer_idx  # type: ignore[assignment]
    tables, window = cascade_pass.tables, cascade_pass.windows[layer]
    held = cascade_pass.memory.layer(layer, key[0], value[0])
    for blocks, new in zip(held, (key, value), strict=True):
        blocks.flatten(0, 1).index_copy_(0, tables.slots, new[0].transpose(0, 1))
    special = {} if softcap is None and s_aux is None else {"softcap": softcap, "sinks": s_aux}  # for `padded`, see `takes`
    out = cascade_pass.kernel(
        query[0].transpose(0, 1),
        *held,
        tables.ends,
        None,
        tables.longest,
        tables.farthest,
        scale=scaling,
        window_size=_sight(window, tables.longest),
        enable_gqa=query.shape[1] != key.shape[1],
        seqused_k=tables.lengths,
        block_table=tables.blocks,
        **special,
    )
    return out[None], None


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
    """The same where a session's keys and values are gathered: row by row, or all at once in a pass that is captured."""
    way = attend if isinstance(cascade_pass, PagedPass) else kv.attend
    return way(module, query, key, value, attention_mask, cascade_pass=cascade_pass, **options)  # type: ignore[arg-type]


def _sight(window: int | None, longest: int) -> tuple[int, int]:
    """Positions that the kernel shows a query before its own and behind it; -1 is all.

    Behind the only token of a row there is nothing to hide, and the kernel is faster where it need not.
    """
    if window is None:
        return -1, 0 if longest > 1 else -1
    return window - 1, 0


AttentionInterface.register(PAGED, attend)
AttentionInterface.register(GATHERED, attend_gathered)


def padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    _: None,
    longest: int,
    farthest: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the kernel computes, for rows of ``longest`` tokens each, by operations that every device has and can capture.

    All blocks of the tables are gathered. Of positions that nothing was written to nothing is taken, not even infinities.
    """
    rows, (kv_heads, size) = len(block_table), key.shape[2:]
    heads, group = query.shape[1], query.shape[1] // kv_heads
    table = block_table.flatten()
    place = torch.arange(block_table.shape[1] * key.shape[1], device=query.device)
    void = (place >= seqused_k[:, None])[:, None, :, None]
    keys, values = (
        part.index_select(0, table).view(rows, -1, kv_heads, part.shape[3]).transpose(1, 2).masked_fill(void, 0)
        for part in (key, value)
    )
    own = (seqused_k[:, None] - longest + torch.arange(longest, device=query.device)).clamp(min=0)[..., None]
    seen = place <= own
    if window_size[0] >= 0:
        seen = seen & (place >= own - window_size[0])
    seen = seen.repeat(1, group, 1)[:, None]  # heads that share keys become queries of one head
    folded = query.view(rows, longest, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=seen, scale=scale)
    else:
        out = _written_out(folded, keys, values, seen, size**-0.5 if scale is None else scale, softcap, sinks)
    out = out.view(rows, kv_heads, group, longest, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * longest, heads, -1)


def _written_out(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = query @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        rows, kv_heads, queries, _ = query.shape
        sink = sinks.view(1, kv_heads, -1, 1).expand(rows, -1, -1, queries * kv_heads // len(sinks))
        scores = torch.cat([scores, sink.reshape(rows, kv_heads, queries, 1).to(scores.dtype)], dim=-1)
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype)[..., : keys.shape[2]] @ values


def choose(device: torch.device, dtype: torch.dtype, found: Survey) -> Attention:
    """The best way on ``device`` for a model that was looked at."""
    if device.type != "cuda":
        return Contiguous()
    kernel = find_kernel(device, dtype, found)
    if kernel is None:
        log.warning("PyTorch %s has no kernel for this model on %s: keys and values are gathered", torch.__version__, device)
        return Gathered()
    return Varlen(kernel, device)


def find_kernel(device: torch.device, dtype: torch.dtype, found: Survey) -> Kernel | None:
    """PyTorch's kernel if it says what it should, for a model with such heads on ``device``."""
    if not takes(found) or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    windows = {None, *found.windows.values()}
    for kernel in (varlen_attn, _with_sums(varlen_attn)):
        if all(agrees(kernel, heads, window, device, dtype) for heads in found.heads for window in windows):
            return kernel
    return None


def takes(found: Survey) -> bool:
    """Whether the layers of a model are of a kind that the kernel is for."""
    sizes = all(size == values and size <= LARGEST_HEAD and not size % 8 for _, _, size, values in found.heads)
    return sizes and found.plain


def _with_sums(kernel: Kernel) -> Kernel:
    """The same for implementations that ask for sums of lengths beside block tables; others refuse them."""

    def call(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: None, *sizes: int, **options: Any) -> Tensor:
        sums = F.pad(options["seqused_k"].cumsum(0), (1, 0)).int()
        out: Tensor = kernel(query, key, value, ends, sums, *sizes, **options)
        return out

    return call


@torch.inference_mode()
def agrees(
    kernel: Kernel, heads: tuple[int, int, int, int], window: int | None, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether ``kernel`` runs, and sees what a row may see: tried with rows of several lengths in scattered blocks."""
    num, kv_heads, size, _ = heads
    noise = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(6, PAGE, kv_heads, size, generator=noise).to(device, dtype) for _ in range(2))
    tables = [[5, 2, 4], [3, 0, 0], [1, 0, 0]]
    for longest, rows in ((3, [(3, 2 * PAGE + 9), (2, 30), (1, 1)]), (1, [(1, 2 * PAGE + 9), (1, 30), (1, 1)])):
        counts, lengths = zip(*rows, strict=True)
        query = torch.randn(sum(counts), num, size, generator=noise).to(device, dtype)
        ends = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        used = torch.tensor(lengths, dtype=torch.int32, device=device)
        blocks = torch.tensor(tables, dtype=torch.int32, device=device)
        try:
            out = kernel(
                query,
                keys,
                values,
                ends,
                None,
                longest,
                max(lengths),
                scale=None,
                window_size=_sight(window, longest),
                enable_gqa=num != kv_heads,
                seqused_k=used,
                block_table=blocks,
            )
            found = out.float().cpu()
        except (RuntimeError, ValueError, TypeError) as error:
            log.info("The kernel for rows in blocks does not run: %s", error)
            return False
        begin = 0
        for (count, length), table in zip(rows, tables, strict=True):
            past, said = (part[table].flatten(0, 1)[:length].float().cpu() for part in (keys, values))
            expected = _plainly(query[begin : begin + count].float().cpu(), past, said, window)
            if not torch.allclose(found[begin : begin + count], expected, atol=TOLERANCE, rtol=TOLERANCE):
                return False
            begin += count
    return True


def _plainly(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """``[n, heads, size]`` against ``[length, kv_heads, size]``, of which the queries are the last ``n``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,lhd->hnl", query, keys) * query.shape[2] ** -0.5
    behind = torch.arange(len(query))[:, None] + len(keys) - len(query) - torch.arange(len(keys))
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
