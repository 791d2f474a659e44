"""The dtype that a device is fast with, told from its processor: no weight is rounded, and what was asked for is honoured."""

import logging
from pathlib import Path

import pytest
import torch

from cascade.cpu.processor import has_bfloat16
from cascade.engine.checkpoint import anatomy
from cascade.engine.devices import held_dtype
from cascade.engine.model import Model
from cascade.engine.network.products import keeps_bits
from cascade.settings.check import needs, remarks
from cascade.settings.config import CascadeConfig
from tests.architectures import build

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama").to(torch.float16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_dtype_rounds_the_weights_that_were_saved(dtype: torch.dtype) -> None:
    """Guards against another model than was asked for: a dtype is only ever replaced by one that holds its numbers."""
    assert held_dtype(dtype, CPU) is (torch.float32 if dtype is torch.float16 else dtype)
    assert held_dtype(dtype, CUDA) is dtype


@pytest.mark.parametrize(
    ("taken", "capability", "instructions", "fast"),
    [
        (True, "AVX512", True, True),
        (True, "AVX512", False, False),  # oneDNN emulates it there: half as fast as float32
        (True, "DEFAULT", False, True),  # AVX-NE-CONVERT, or Arm
        (False, "AVX2", True, False),  # a processor that is told to hide its instructions
    ],
)
def test_bfloat16_is_fast_with_instructions_for_it(
    taken: bool, capability: str, instructions: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards processors with AVX-512 and no bfloat16, which oneDNN takes without being fast."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: taken)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_bfloat16() == fast


def test_models_are_held_in_what_is_fast(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards models in float16, which processors multiply slowly, the line that says so, and a dtype that is asked for."""
    with caplog.at_level(logging.INFO, "cascade"):
        model = Model.from_pretrained(str(folder), device="cpu", cache_tokens=1024)
    assert model.dtype is torch.float32
    assert "was saved in torch.float16, which is slow on this processor" in caplog.text
    assert model.summary.startswith("float32 on ")
    caplog.clear()
    with caplog.at_level(logging.INFO, "cascade"):
        asked = Model.from_pretrained(str(folder), dtype="bfloat16", device="cpu", cache_tokens=1024)
    assert asked.dtype is torch.bfloat16, "what is asked for is honoured"
    assert caplog.text == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_told_before_loading_is_found(dtype: torch.dtype, folder: Path) -> None:
    """Guards `cascade check` against promising more, or less, than the replica that is started.

    Mixtures, whose passes may differ in their last bits, and widths of 20 and 24, which PyTorch does not take evenly, say so.
    """
    tier = {"name": "full", "model_loading_config": {"model_id": "m", "model_source": str(folder)}}
    config = CascadeConfig.parse({"tiers": [tier | {"engine_kwargs": {"device": "cpu", "dtype": str(dtype)[6:]}}]})
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    for name, changes in (("llama", sizes), ("mixtral", {}), ("minicpm3", {})):
        network = build(name, **changes).to(dtype)
        network.save_pretrained(folder)
        promised = keeps_bits(network, dtype)
        assert name == "llama" or not promised
        assert Model(network, cache_tokens=1024).same_bits == promised
        told = [
            remark for remark in remarks(needs(config)) if remark.startswith("Logits of tier full may differ in their last")
        ]
        assert bool(told) != promised


def test_check_counts_the_memory_of_what_is_held(folder: Path) -> None:
    """Guards `cascade check`: float32 takes twice the memory of the checkpoint, for weights and for keys and values."""
    model = {"model_id": "m", "model_source": str(folder)}
    tiers = [
        {"name": "small", "model_loading_config": model, "engine_kwargs": {"dtype": "bfloat16", "device": "cpu"}},
        {"name": "full", "model_loading_config": model, "engine_kwargs": {"device": "cpu"}},
    ]
    small, full = needs(CascadeConfig.parse({"tiers": tiers}))
    assert full.weight_bytes == 2 * small.weight_bytes
    assert full.anatomy.cache_bytes_per_token == 2 * small.anatomy.cache_bytes_per_token
    assert (small.anatomy.widened, full.anatomy.widened) == (None, torch.float16)
    assert anatomy(str(folder), device=CUDA).dtype is torch.float16
