"""What differs on GPUs, as far as CPUs can show it: blocks, streams, graphs, models of one process; and some of its layers."""

import contextlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2AudioConfig

from cascade import ConfigError, SamplingParams
from cascade.drafters import DrafterSpec
from cascade.engine.model import Model
from cascade.engine.sampling.state import state_maker
from cascade.engine.vllm.blocks import RESERVED
from cascade.engine.vllm.engine import pass_options
from cascade.engine.vllm.model import VllmModel
from cascade.engine.vllm.worker import Batch, CascadeWorker, dispatched
from cascade.messages import SessionSpec
from cascade.params import MAX_BRANCHES
from cascade.scorer import Row
from tests.architectures import VOCAB, build
from tests.vllm.models import ARCHITECTURES, GREEDY, OPTIONS, Pair, saved, started
from tests.vllm.test_laws import own_model, scores_alike


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("llama", tmp_path_factory.mktemp("llama"))


def test_kernels_may_see_a_block_as_several(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards attention backends with blocks of a fixed size: they read other blocks than those that were written."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", staticmethod(lambda spec=None: [32]))
    with closing(started(source, block_size=128)) as model:
        scores_alike(Pair(model, own_model(source)), seed=3)
        base, other = model.new_cache(), model.new_cache()
        base.reserve(64)
        expected = model.logits([Row(base, 0, list(range(40)), 1, GREEDY)]).clone()
        other.reuse(base, 39)
        torch.testing.assert_close(model.logits([Row(other, 39, [39], 1, GREEDY)]), expected, rtol=1e-4, atol=1e-4)


def test_models_of_a_process_share_no_scratch_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tiers of one process, whose passes run at once on a GPU: vLLM gave all the memory of the latest model, and graphs
    of all one pool."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import current_workspace_manager, init_workspace_manager

    monkeypatch.setattr(type(current_platform), "graph_pool_handle", lambda self: object(), raising=False)
    pools, used, models = [], [], []
    forward = CascadeWorker._forward

    def watched(*args: Any) -> Any:
        used.append(current_workspace_manager())
        return forward(*args)

    monkeypatch.setattr(CascadeWorker, "_forward", watched)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            init_workspace_manager(torch.device("cpu"))  # as workers of a GPU do
            models.append(stack.enter_context(closing(started(source))))
            pools.append(current_platform.get_global_graph_pool())
        for model in (*models, *models):
            model.run([Row(model.new_cache(), 0, [3, 4, 5], 1, GREEDY)])
    assert pools[0] is not pools[1]
    assert used[0] is used[2] is not used[1] is used[3]


def test_all_that_workers_do_is_in_the_order_of_passes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards new weights on a GPU: they were written on another stream than that of the passes, under a pass that ran."""
    current, mine, seen = [None], object(), []

    @contextlib.contextmanager
    def stream(one: Any) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(pair.vllm, "_stream", mine)
    call = CascadeWorker.cascade_call

    def watched(worker: CascadeWorker, method: str, *args: Any, **options: Any) -> Any:
        seen.append((method, current[-1]))
        return call(worker, method, *args, **options)

    monkeypatch.setattr(CascadeWorker, "cascade_call", watched)
    base, other = pair.vllm.new_cache(), pair.vllm.new_cache()
    pair.vllm.run([Row(base, 0, [3, 4, 5], 1, GREEDY)])
    other.reuse(base, 2)
    pair.vllm.logits([Row(other, 2, [5], 1, GREEDY)])
    pair.vllm.renew(pair.vllm._source)
    assert [method for method, _ in seen] == ["cascade_score", "cascade_copy", "cascade_score", "reload_weights"]
    assert {stream for _, stream in seen} == {mine}


def test_a_pass_that_chooses_nothing_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards chunks of a prompt with penalties: nothing was read of such a pass, so it seemed over when it was begun, and the
    next one wrote over what it was still to read."""
    params = SamplingParams(temperature=0, seed=0, presence_penalty=0.5)
    prompt, store = [3, 4, 5, 6], pair.vllm.new_cache()
    state = state_maker()(SessionSpec(tokens=tuple(prompt), prompt_len=4, params=params), prompt)
    monkeypatch.setattr(pair.vllm, "_ahead", True)
    launched = pair.vllm.launch([Row(store, 0, prompt[:3], 0, params, state)])
    assert not isinstance(launched.output, Tensor)  # whose values only are waited for
    [scored] = pair.vllm.collect(launched)
    assert not scored.own


LATENT: dict[str, Any] = {
    "hidden_size": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}


def test_latent_keys_and_values_have_the_room_that_is_asked_for(tmp_path: Path) -> None:
    """Guards `cache_tokens` of models with latent attention, whose blocks are of another size than those of others."""
    network: Any = build("deepseek_v2", **LATENT)
    network.config.architectures = ["DeepseekV2ForCausalLM"]
    network.save_pretrained(tmp_path)
    with closing(VllmModel(str(tmp_path), cache_tokens=1000, options={"dtype": "float32", "enforce_eager": True})) as model:
        assert 1000 <= model.cache_tokens < 1000 + model._blocks.block
        assert model._blocks.total == RESERVED + model.cache_tokens // model._blocks.block


def test_a_model_that_also_hears_reads_text(tmp_path: Path) -> None:
    """Guards models with parts for images or sound, none of which started: vLLM asked for a tokenizer to read these with."""
    network = build("qwen2", **ARCHITECTURES["qwen2"])
    network.save_pretrained(tmp_path / "text")
    weights = load_file(tmp_path / "text" / "model.safetensors")
    sound = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    config = Qwen2AudioConfig(text_config=network.config.to_dict(), audio_config=sound, audio_token_index=VOCAB - 1)
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    config.save_pretrained(tmp_path / "heard")
    save_file({f"language_model.{name}": part for name, part in weights.items()}, tmp_path / "heard" / "model.safetensors")
    with closing(started(str(tmp_path / "heard"))) as model:
        scores_alike(Pair(model, own_model(str(tmp_path / "text"))), seed=6, passes=8)


# some of a model's layers


KEPT = (0, 2, 3)
WINDOWS: dict[str, Any] = {
    "llama": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize(("name", "ranks"), [("llama", 1), ("llama", 2), ("gemma2", 1)])
def test_layers_score_as_on_our_own_engine(name: str, ranks: int, tmp_path: Path) -> None:
    """Guards names of weights, windows and every rank; a layer that is left out could not be read, for it is not whole."""
    network = build(name, num_hidden_layers=4, **ARCHITECTURES[name], **WINDOWS[name])
    network.config.architectures = [type(network).__name__]
    network.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    spoiled = {name: part[:1].clone() if ".layers.1." in name else part.clone() for name, part in weights.items()}
    save_file(spoiled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {**OPTIONS, "tensor_parallel_size": ranks}
    with closing(VllmModel(str(tmp_path), cache_tokens=1024, layers=KEPT, options=options)) as model:
        own = Model.from_pretrained(str(tmp_path), dtype="float32", device="cpu", cache_tokens=1024, layers=KEPT)
        scores_alike(Pair(model, own), seed=len(name), passes=10 // ranks**2)


def test_a_head_reads_all_layers() -> None:
    """Guards heads, which read layers by number: one sentence before anything is loaded."""
    with pytest.raises(ConfigError, match="layers are 0-3 and drafter is 'eagle3', which reads all: remove one of the two"):
        VllmModel("anything", layers=range(4), drafter=DrafterSpec("eagle3", "a/b"), options={"dtype": "float32"})


# graphs of whole passes


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
