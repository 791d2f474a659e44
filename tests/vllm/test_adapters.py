"""LoRA adapters on vLLM: each row of a pass follows its own."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from cascade import Cascade, ModelError, SamplingParams, Speculation
from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.vllm.model import VllmModel
from cascade.scorer import Row
from tests import small
from tests.architectures import build
from tests.vllm.models import OPTIONS, WIDE, saved

NAMES = ("", "red", "blue")
PROMPT = list(range(5, 45))


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


def expected(folder: Path, name: str) -> list[int]:
    """What Transformers writes with the adapter merged into the weights."""
    network: Any = build("llama", **WIDE)
    if name:
        network = PeftModel.from_pretrained(network, folder / name).merge_and_unload()
    ids = torch.tensor([PROMPT])
    written: Tensor = network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    return written[0, len(PROMPT) :].tolist()


def test_requests_get_the_text_of_their_adapter(folder: Path) -> None:
    """Guards rows without an adapter, which on a CPU followed the last one that was loaded, and companions of another."""
    source, adapters = str(folder / "model"), {name: str(folder / name) for name in NAMES if name}
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, adapter=name) for name in (*NAMES, *NAMES)]
    options: dict[str, Any] = {"cache_tokens": 1024, "options": OPTIONS}
    with (
        closing(VllmModel(source, adapters=adapters, **options)) as model,
        closing(VllmModel(source, adapters={"red": adapters["red"]}, draft=True, **options)) as red,
        Cascade([red, Model(build("llama", **WIDE)), model], Tokenizer.from_pretrained(small.paths()[-1])) as cascade,
    ):
        streams = [cascade.stream(PROMPT, one, Speculation(tiers=cascade.names[:-1])) for one in params]
        texts = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
    assert texts == [expected(folder, one.adapter) for one in params]
    assert len(set(map(tuple, texts))) == len(NAMES)


def test_a_pass_reads_the_copy_of_an_adapter(folder: Path, tmp_path: Path) -> None:
    """Guards the sessions beside it: a pass read the adapter from the shared folder, however slow that was."""
    shutil.copytree(folder / "red", tmp_path / "red")
    adapters = AdapterFolder(str(tmp_path))
    adapters.place("red")
    shutil.rmtree(tmp_path / "red")
    params, start, text = SamplingParams(temperature=0, seed=0, adapter="red"), 0, list(PROMPT)
    with closing(VllmModel(str(folder / "model"), cache_tokens=1024, folder=adapters, most=1, options=OPTIONS)) as model:
        cache = model.new_cache()
        cache.reserve(len(PROMPT) + 20)
        for _ in range(20):
            [scored] = model.run([Row(cache, start, text[start:], 1, params)])
            start, text = len(text), [*text, *scored.own]
    assert text[len(PROMPT) :] == expected(folder, "red")


def test_adapters_that_vllm_refuses_are_named(folder: Path) -> None:
    """Guards the start: one sentence with the name, and with what to change."""
    with pytest.raises(ModelError, match=r"The adapter 'green' cannot be loaded from .*green.*max_lora_rank"):
        VllmModel(str(folder / "model"), cache_tokens=1024, adapters={"green": str(folder / "green")}, options=OPTIONS)
