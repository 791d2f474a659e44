"""Which of vLLM's graphs a pass replays. Skipped where vLLM is not installed."""

from types import SimpleNamespace
from typing import Any

import pytest

from cascade.engine.vllm.graphs import dispatched
from tests.vllm import models  # noqa: F401  # asks for vLLM

# vLLM and what it imports warn of themselves
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
SIZES = [1, 2, 4, 8, 16, 24, 32]


def dispatcher(name: str, max_num_seqs: int = 16) -> Any:
    """vLLM's own, as after the capture of `SIZES` in a mode."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # which warns

    mode = CUDAGraphMode[name]
    compilation = SimpleNamespace(
        cudagraph_mode=mode,
        cudagraph_capture_sizes=SIZES,
        max_cudagraph_capture_size=SIZES[-1],
        compile_sizes=None,
        is_attention_compiled_piecewise=lambda: True,
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=0,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )
    made = CudagraphDispatcher(config)
    made.initialize_cudagraph_keys(mode)
    return made


def test_passes_replay_whole_graphs_where_vllm_captured_them() -> None:
    """Guards graphs against rows that they were not captured for, and other modes against graphs whose buffers nobody fills."""
    whole, pieces = dispatcher("FULL"), dispatcher("FULL_AND_PIECEWISE")
    mode, found = dispatched(whole, 5, 2, 0)
    assert (mode.name, found.num_tokens, found.num_reqs) == ("FULL", 8, 8)
    mode, found = dispatched(whole, 20, 16, 0)
    assert (mode.name, found.num_tokens, found.num_reqs) == ("FULL", 24, 16)
    for tokens, rows in ((20, 17), (33, 1)):
        assert dispatched(whole, tokens, rows, 0)[0].name == "NONE"
    mode, found = dispatched(pieces, 5, 5, 0)
    assert (mode.name, found.num_tokens) == ("PIECEWISE", 8)
    assert dispatched(pieces, 33, 1, 0)[0].name == "NONE"
