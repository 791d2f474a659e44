"""Attention over block tables: PyTorch's kernel, found by what it does, and the same by operations that every device has.

A kernel is called as `torch.nn.attention.varlen.varlen_attn`: rows of queries ``[total, heads, size]`` that lie behind each
other, keys and values ``[blocks, block, kv_heads, size]``. The last query of a row sees the row's last position.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.engine.survey import Survey

log = logging.getLogger(__name__)

PAGE = 256  # positions of a block: the kernel of PyTorch takes multiples of these alone
LARGEST_HEAD = 256  # that the kernel takes; sizes of heads are multiples of 8
TOLERANCE = 0.02  # of the kernel's results in 16 bits

Kernel = Callable[..., Any]


def window_size_of(window: int | None, longest: int) -> tuple[int, int]:
    """Positions that the kernel shows a query before its own and behind it; -1 is all.

    Behind the only token of a row there is nothing to hide, and the kernel is faster where it need not.
    """
    if window is None:
        return -1, 0 if longest > 1 else -1
    return window - 1, 0


def gather_attention(
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

    All blocks of the tables are gathered. Positions that were never written add nothing, even where they hold infinities.
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


def find_kernel(device: torch.device, dtype: torch.dtype, found: Survey) -> Kernel | None:
    """PyTorch's kernel, if it computes what it should on ``device`` for a model with such heads; else ``None``."""
    if not takes(found) or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    windows = {None, *found.windows.values()}
    for kernel in (varlen_attn, Summed(varlen_attn)):
        if all(agrees(kernel, heads, window, device, dtype) for heads in set(found.heads.values()) for window in windows):
            return kernel
    return None


def takes(found: Survey) -> bool:
    """Whether the layers of a model are of a kind that the kernel is for."""
    sizes = all(size == values and size <= LARGEST_HEAD and not size % 8 for _, _, size, values in found.heads.values())
    return sizes and found.plain


class Summed:
    """A kernel that is also given sums of lengths: some ask for them beside block tables, and others refuse them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._lengths: Tensor | None = None
        self._sums: Tensor | None = None  # of these lengths: one tensor for all layers of a pass, and so one sum

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: None, *sizes: int, **options: Any) -> Tensor:
        if self._lengths is not options["seqused_k"]:
            self._lengths = options["seqused_k"]
            self._sums = F.pad(options["seqused_k"].cumsum(0), (1, 0)).int()
        out: Tensor = self._kernel(query, key, value, ends, self._sums, *sizes, **options)
        return out


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
                window_size=window_size_of(window, longest),
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
