"""`cascade layers` finds layers that a model can do without, and tells how often the others say what it says."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cascade import SamplingParams
from cascade.agreement import ranked, search, written
from cascade.engine.layers import numbers
from cascade.engine.model import Model
from cascade.prompts import read_prompts
from tests import small
from tests.cli import run

IDLE = (1, 2, 4)  # layers that change nothing; of six
CODE = (
    "def read(path):\n",
    "import os\n\nclass Shape:\n",
    "for name in",
    "def main() -> None:\n",
    "raise ValueError(",
    "x = {",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idle")
    full = small.paths()[-1]
    network = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32)
    with torch.no_grad():
        for layer in IDLE:
            network.model.layers[layer].self_attn.o_proj.weight.zero_()
            network.model.layers[layer].mlp.down_proj.weight.zero_()
    network.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(full).save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in CODE))
    return folder


def test_layers_that_a_model_can_do_without_are_found(folder: Path) -> None:
    """Guards the search, which once kept what was worse: the layers that matter are found, and say all that the model says."""
    code, output = run(
        "layers", str(folder / "model"), "--share", "0.75", "--prompts", str(folder / "prompts.jsonl"), "--max-tokens", "12"
    )
    assert code == 0, output
    layers = numbers(output.split("layers: [")[1].split("]")[0])
    assert {*range(6)} - {*layers} <= {*IDLE}
    assert "1.00" in output


def test_the_agreement_is_that_of_the_tier(folder: Path) -> None:
    """Guards the figure: it is that of the tier as it will be served, read from the checkpoint, along the model's answers."""
    full, prompts = small.paths()[-1], read_prompts(folder / "prompts.jsonl")
    params = SamplingParams(max_tokens=24, temperature=0)
    [found] = search(full, prompts, params, [0.8], 3, dtype="float32")
    sampling = [SamplingParams(max_tokens=24, temperature=0, seed=seed) for seed in range(len(prompts))]
    texts = written(full, prompts, sampling, "float32")[1::2]
    own = ranked(Model.from_pretrained(full, dtype="float32", layers=found.layers), texts, sampling[1::2])
    same = [
        near[0].token == token for text, tier in zip(texts, own, strict=True) for near, token in zip(tier, text[1], strict=True)
    ]
    assert found.agreement == pytest.approx(sum(same) / len(same))
    assert 0 < found.agreement < 1


def test_shares_that_no_layers_have_are_refused(folder: Path) -> None:
    """Guards against a tier of no layers, or of all."""
    for share in ("0.01", "1"):
        code, output = run("layers", str(folder / "model"), "--share", share, "--prompts", str(folder / "prompts.jsonl"))
        assert code == 1
        assert f"share is {float(share):g}: some of the 6 layers take from" in output
