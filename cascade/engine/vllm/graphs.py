"""Chooses which of vLLM's CUDA graphs a pass replays, and fills the buffers that a graph of a whole pass reads.

It depends on vLLM's ``cudagraph_mode``. With ``FULL`` a pass is one graph, which reads block tables, lengths and row bounds
where they were at capture. With other modes passes replay pieces between attention layers; only these have run on a GPU.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cascade.engine.vllm.batch import Batch


def dispatched(dispatcher: Any, num_tokens: int, num_rows: int, num_adapters: int) -> tuple[Any, Any]:
    """Mode and descriptor of the captured graph for a pass, by vLLM's ``CudagraphDispatcher``; ``NONE`` if there is none."""
    from vllm.config import CUDAGraphMode

    most = dispatcher.vllm_config.scheduler_config.max_num_seqs
    whole = dispatcher.cudagraph_mode == CUDAGraphMode.FULL and num_rows <= most
    adapted = {"has_lora": num_adapters > 0, "num_active_loras": num_adapters}
    graph: tuple[Any, Any] = dispatcher.dispatch(num_tokens, invalid_modes=None if whole else {CUDAGraphMode.FULL}, **adapted)
    return graph


def held(runner: Any, batch: Batch, slots: Tensor, num_rows: int) -> dict[str, Any]:
    """Write the attention metadata of a pass into the buffers of vLLM's runner; returns it for `CommonAttentionMetadata`.

    ``slots`` int64 are those of all tokens, padding included. Rows up to ``num_rows`` are empty. The buffers are
    pinned: they may be written again once the pass has ended.
    """
    table, bounds, number = runner.input_batch.block_table[0], runner.query_start_loc, len(batch.starts)
    for place, blocks in enumerate(batch.tables):
        table.add_row(blocks, place)
    for place in range(number, num_rows):
        table.clear_row(place)
    table.commit_block_table(num_rows)
    table.slot_mapping.gpu[: len(slots)].copy_(slots)
    bounds.np[: number + 1] = [0, *accumulate(batch.lengths)]
    bounds.np[number + 1 : num_rows + 1] = bounds.np[number]
    bounds.copy_to_gpu(num_rows + 1)
    ends = [start + length for start, length in zip(batch.starts, batch.lengths, strict=True)]
    ends += [0] * (len(runner.seq_lens) - number)
    pinned = torch.tensor(ends, dtype=torch.int32, pin_memory=runner.device.type == "cuda")
    runner.seq_lens.copy_(pinned, non_blocking=True)
    return {
        "query_start_loc": bounds.gpu[: num_rows + 1],
        "query_start_loc_cpu": bounds.cpu[: num_rows + 1],
        "seq_lens": runner.seq_lens[:num_rows],
        "seq_lens_cpu_upper_bound": pinned[:num_rows],
        "num_reqs": num_rows,
        "num_actual_tokens": len(slots),
        "max_query_len": len(slots),  # the value at capture
        "max_seq_len": max(ends),
        "block_table_tensor": table.get_device_tensor(num_rows),
        "slot_mapping": table.slot_mapping.gpu[: len(slots)],
        "is_prefilling": torch.zeros(num_rows, dtype=torch.bool),
    }
