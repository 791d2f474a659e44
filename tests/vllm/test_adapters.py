"""LoRA adapters on vLLM: each row of a pass follows its own, as on our own engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cascade import Cascade, ModelError, SamplingParams
from cascade.engine.adapters import AdaptedModel
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from tests import small
from tests.architectures import build
from tests.vllm.models import OPTIONS, WIDE, saved

from cascade.engine.vllm.model import VllmModel  # isort: skip  # needs vLLM, which the line above asks for

# vLLM and what it imports warn of themselves
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
NAMES = ("", "red", "blue")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters red and blue for it, and green of a higher rank than vLLM takes unless told."""
    path = tmp_path_factory.mktemp("adapters")
    saved("llama", path / "model")
    for seed, name in enumerate(("red", "blue", "green")):
        network: Any = build("llama", **WIDE)
        torch.manual_seed(seed)
        rank = 32 if name == "green" else 4
        adapted = get_peft_model(network, LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "down_proj"]))
        for key, weight in adapted.named_parameters():
            if "lora" in key:
                torch.nn.init.normal_(weight, std=0.4)
        adapted.save_pretrained(path / name)
    return path


def test_requests_get_the_text_of_their_adapter(folder: Path) -> None:
    """Guards rows without an adapter, which on a CPU followed the last one that was loaded, and companions of another: requests
    at once, prefixes in common, a tier below without adapters."""
    source, adapters = str(folder / "model"), {name: str(folder / name) for name in NAMES if name}
    own = AdaptedModel(load(source, dtype="float32", device="cpu"), adapters, cache_tokens=1024)
    model = VllmModel(source, cache_tokens=1024, adapters=adapters, options=OPTIONS)
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, adapter=name) for name in (*NAMES, *NAMES)]
    tokenizer, texts = Tokenizer.from_pretrained(small.paths()[-1]), []
    for tiers in ([Model(build("llama", **WIDE)), model], [own]):
        with Cascade(tiers, tokenizer) as cascade:
            streams = [cascade.stream(list(range(5, 45)), one) for one in params]
            texts.append([[token for chunk in stream for token in chunk.token_ids] for stream in streams])
    model.close()
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts[0]))) == len(NAMES)


def test_adapters_that_vllm_refuses_are_named(folder: Path) -> None:
    """Guards the start: one sentence with the name, and with what to change."""
    with pytest.raises(ModelError, match=r"The adapter 'green' cannot be loaded from .*green.*max_lora_rank"):
        VllmModel(str(folder / "model"), cache_tokens=1024, adapters={"green": str(folder / "green")}, options=OPTIONS)
