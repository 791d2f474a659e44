"""What `torch.nn.attention.varlen.varlen_attn` computes by its documentation, without a GPU, position by position."""

import torch
from torch import Tensor


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention ``[total_q, heads, size]`` over ``key`` and ``value`` ``[pages, page_size, kv_heads, size]``.

    The last query of a row sees its last key: causality is aligned at the end. A query that sees nothing is 0. As the kernel,
    it does not look behind ``seqused_k``, and takes int32 alone, lengths without strides.
    """
    assert cu_seq_k is None
    assert block_table is not None
    assert seqused_k is not None
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert cu_seq_q.is_contiguous()
    assert seqused_k.is_contiguous()
    assert block_table.stride(-1) == query.stride(-1) == key.stride(-1) == 1
    assert enable_gqa == (query.shape[1] != key.shape[2])
    rows = len(cu_seq_q) - 1
    assert seqused_k.shape == (rows,)
    assert len(block_table) == rows
    left, right = window_size
    assert right == 0 or (right == -1 and max_q == 1), "not causal"
    out = torch.full((*query.shape[:2], value.shape[3]), torch.nan, dtype=query.dtype)
    for row, (begin, end) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
        length = int(seqused_k[row])
        assert end - begin <= max_q
        assert length <= max_k
        assert length <= block_table.shape[1] * key.shape[1]
        pages = block_table[row, : -(-length // key.shape[1])].long()
        keys, values = (part[pages].flatten(0, 1)[:length] for part in (key, value))
        for token in range(begin, end):
            last = length - (end - token)  # the position of this query
            first = 0 if left < 0 else max(0, last - left)
            out[token] = _see(query[token], keys[first : last + 1], values[first : last + 1], scale) if last >= 0 else 0
    return out


def _see(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """``[heads, size]`` against ``[n, kv_heads, size]``, all of them."""
    folded = query.reshape(keys.shape[1], -1, query.shape[1])
    scores = torch.einsum("kgd,nkd->kgn", folded, keys) * (query.shape[1] ** -0.5 if scale is None else scale)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return torch.einsum("kgn,nkd->kgd", weights, values).reshape(query.shape[0], -1)
