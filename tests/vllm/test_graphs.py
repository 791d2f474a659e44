"""Graphs of whole passes: which one a pass replays, and what lies where it reads."""

from types import SimpleNamespace
from typing import Any

import pytest

from cascade.engine.vllm.engine import pass_options
from cascade.engine.vllm.worker import Batch, CascadeWorker, dispatched
from cascade.params import MAX_BRANCHES
from tests.vllm.models import Pair
from tests.vllm.test_laws import scores_alike

SIZES = [1, 2, 4, 8, 16, 24, 32]


def dispatcher(name: str, sizes: list[int] = SIZES, max_num_seqs: int = 16) -> Any:
    """vLLM's own, as after the capture of ``sizes`` in a mode."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # which warns

    mode = CUDAGraphMode[name]
    captured = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
    compilation = SimpleNamespace(**captured, compile_sizes=None, is_attention_compiled_piecewise=lambda: True)
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs)
    config = {"compilation_config": compilation, "scheduler_config": scheduler, "lora_config": None}
    made = CudagraphDispatcher(SimpleNamespace(**config, num_speculative_tokens=0))
    made.initialize_cudagraph_keys(mode)
    return made


def test_passes_replay_whole_graphs_where_vllm_captured_them() -> None:
    """Guards graphs against rows that they were not captured for, and other modes against graphs whose buffers nobody fills."""
    whole, pieces = dispatcher("FULL"), dispatcher("FULL_AND_PIECEWISE")
    for made, tokens, rows, name, sizes in (
        (whole, 5, 2, "FULL", (8, 8)),
        (whole, 20, 16, "FULL", (24, 16)),
        (whole, 20, 17, "NONE", ()),
        (whole, 33, 1, "NONE", ()),
        (pieces, 5, 5, "PIECEWISE", (8,)),
        (pieces, 33, 1, "NONE", ()),
    ):
        mode, found = dispatched(made, tokens, rows, 0)
        assert mode.name == name
        assert (found.num_tokens, found.num_reqs)[: len(sizes)] == sizes


@pytest.mark.parametrize(("tokens", "sessions"), [(512, 256), (512, 8), (512, 1), (100, 256), (2048, 300)])
def test_a_tiers_passes_have_graphs(tokens: int, sessions: int) -> None:
    """Guards rows with guesses and branches: vLLM captures graphs for twice `max_num_seqs` tokens unless it is told."""
    options = pass_options(tokens, sessions, {})
    made = dispatcher("FULL", options["cudagraph_capture_sizes"], options["max_num_seqs"])
    for size in range(1, min(tokens, 512) + 1):
        for rows in {1, min(size, sessions), min(size, sessions + MAX_BRANCHES)}:
            mode, found = dispatched(made, size, rows, 0)
            assert mode.name == "FULL"
            assert size <= found.num_tokens <= max(4, 1.5 * size)
            assert rows <= found.num_reqs


def test_passes_over_the_buffers_of_graphs_are_those_of_our_own_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a graph reads: passes filled up with tokens and empty rows, after larger passes, change no logit."""
    scheduler, options = pair.vllm._engine.vllm_config.scheduler_config, pass_options(512, 256, {})
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        assert getattr(scheduler, name) == options[name]
    made, modes = dispatcher("FULL"), set()

    def graph(worker: CascadeWorker, batch: Batch) -> tuple[Any, Any]:
        found = dispatched(made, len(batch.tokens), len(batch.starts), 0)
        modes.add(found[0].name)
        return found

    monkeypatch.setattr(CascadeWorker, "_graph", graph)
    scores_alike(pair, seed=11, passes=60)
    assert "FULL" in modes
