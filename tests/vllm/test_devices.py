"""What differs on GPUs, as far as CPUs can show it: kernels' blocks, streams, and what models of a process share."""

import contextlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2AudioConfig

from cascade import SamplingParams
from cascade.engine.sampling.state import state_maker
from cascade.engine.vllm.blocks import RESERVED
from cascade.engine.vllm.model import VllmModel
from cascade.engine.vllm.worker import CascadeWorker
from cascade.messages import SessionSpec
from cascade.scorer import Row
from tests.architectures import VOCAB, build
from tests.vllm.models import ARCHITECTURES, GREEDY, Pair, saved, started
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
        base.free()
        other.free()


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
            store = model.new_cache()
            model.run([Row(store, 0, [3, 4, 5], 1, GREEDY)])
            store.free()
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
    base.free()
    other.free()
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
    store.free()


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
