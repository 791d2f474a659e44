"""One model over several processes: the text of one rank, and clean ends when a rank is lost."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cascade import ModelError, family
from cascade.engine.loading import load
from cascade.engine.parallel import LeadingModel, check_ranks
from tests.architectures import build

LEADER = """
import asyncio, json, os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from cascade import Cascade, SamplingParams, Speculation, Unavailable, family
from cascade.engine.adapters import AdaptedModel
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.parallel import LeadingModel
from cascade.scorer import Row
from cascade.engine.tokenizer import Tokenizer

source, ranks, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
method = "int8" if job == "int8" else None

def main():
    device = None if torch.cuda.is_available() else "cpu"
    shared = LeadingModel.launch(source, ranks, dtype="float32", device=device, quantization=method)
    alone = Model.from_pretrained(source, dtype="float32", device="cpu", quantization=method)
    drafter = Model.from_pretrained(source, dtype="bfloat16", device="cpu")
    tokenizer = Tokenizer.from_pretrained(family.paths()[0])
    prompts = [[5, 9, 2, 44, 17], list(range(3, 60)), list(range(3, 58)) + [7, 7]] * 2  # with beginnings in common
    with Cascade([drafter, shared], tokenizer) as cascade, Cascade([alone], tokenizer) as single:
        if job == "lose":
            cascade.generate(prompts[0], SamplingParams(max_tokens=4))
            os.kill(shared._followers[-1].pid, signal.SIGKILL)
            shared._followers[-1].wait()
            try:
                cascade.generate(prompts[0], SamplingParams(max_tokens=64))
            except Unavailable as error:
                print(json.dumps({"error": str(error), "healthy": shared.healthy}))
            shared.close()
            return
        texts = []
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
            texts.append([[list(c.token_ids) for c in one.generate(prompts, params)] for one in (cascade, single)])
        first = cascade.generate(prompts[1], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    params = SamplingParams(temperature=0, seed=0)
    found = [model.logits([Row(model.new_cache(), 0, prompts[1], 57, params)]) for model in (shared, alone)]
    shared.close()
    print(json.dumps({
        "error": (found[0] - found[1]).abs().max().item(),
        "same": [pair[0] == pair[1] for pair in texts],
        "again": list(first.token_ids) == texts[0][0][1],
        "ended": [f.returncode for f in shared._followers],
    }))

def adapt():
    adapters = {name: f"{source}/../{name}" for name in ("red", "blue")}
    shared = LeadingModel.launch(source, ranks, dtype="float32", adapters=adapters)
    alone = AdaptedModel(load(source, dtype="float32", device=str(shared.device)), adapters)
    tokenizer, prompts = Tokenizer.from_pretrained(family.paths()[0]), [[5, 9, 2, 44, 17], list(range(3, 60))]

    async def write(cascade):
        names = ("red", "", "blue")  # at once, so that they share passes
        asked = [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, adapter=name) for name in names]
        done = await asyncio.gather(*(cascade.agenerate(prompts, params) for params in asked))
        return [[list(text.token_ids) for text in texts] for texts in done]

    texts = []
    for model in (shared, alone):
        with Cascade([model], tokenizer) as cascade:
            texts.append(asyncio.run(write(cascade)))
    shared.close()
    different, ended = len(set(map(str, texts[1]))), [follower.returncode for follower in shared._followers]
    print(json.dumps({"same": texts[0] == texts[1], "different": different, "ended": ended}))

adapt() if job == "adapt" else main()
"""


def leader(source: Path | str, ranks: int, job: str) -> dict[str, Any]:
    """What a process says that leads ``ranks``."""
    done = subprocess.run(
        [sys.executable, "-c", LEADER, str(source), str(ranks), job], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.mark.slow  # in the default run those with quantised weights stand for them
@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("qwen3", 4), ("mixtral", 2)])
def test_ranks_write_what_one_would(folder: Path, name: str, ranks: int) -> None:
    """Guards heads, keys and values shared among ranks: chunks, drafts, rollbacks and companions as on one."""
    build(name, num_key_value_heads=4).save_pretrained(folder)
    said = leader(folder, ranks, "write")
    assert said["same"] == [True, True]
    assert said["again"]
    assert said["ended"] == [0] * (ranks - 1)


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3", 4), ("mixtral", 2)))]
)
def test_ranks_share_quantised_weights(folder: Path, name: str, ranks: int) -> None:
    """Guards shares against scales of their own: layers that are split along their input would hold other numbers."""
    build(name, num_key_value_heads=4).save_pretrained(folder)
    said = leader(folder, ranks, "int8")
    assert said["same"] == [True, True]
    assert said["again"]
    assert said["error"] < 1e-4, "rounding of sums alone; scales of their own make it 0.05"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's own
def test_ranks_share_adapters(folder: Path) -> None:
    """Guards adapters against ranks that add the whole of one, or another one, to their share of a layer."""
    build("llama", num_key_value_heads=4).save_pretrained(folder)
    for seed, name in enumerate(("red", "blue")):
        network: Any = build("llama", num_key_value_heads=4)
        torch.manual_seed(seed)
        adapted = get_peft_model(network, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]))
        for key, weight in adapted.named_parameters():
            if "lora" in key:
                torch.nn.init.normal_(weight, std=0.4)
        adapted.save_pretrained(folder.parent / name)
    said = leader(folder, 2, "adapt")
    assert said["same"]
    assert said["different"] == 3
    assert said["ended"] == [0]


def test_a_lost_rank_ends_the_model(folder: Path) -> None:
    """Guards against a replica that hangs or goes on with half a model when a rank is killed."""
    build("llama").save_pretrained(folder)
    said = leader(folder, 2, "lose")
    assert not said["healthy"]
    assert "full" in said["error"]


@pytest.mark.parametrize(
    ("ranks", "words"), [(3, "does not divide the 12 heads and 4 key/value heads .*: take one of 1, 2, 4$"), (8, "take one of")]
)
def test_sizes_that_do_not_divide_the_heads_are_refused(ranks: int, words: str) -> None:
    """Guards the start: nothing is launched, and the sizes that fit are named."""
    with pytest.raises(ModelError, match=f"tensor_parallel_size is {ranks}.*{words}"):
        LeadingModel.launch(family.paths()[-1], ranks)


def test_ranks_load_to_what_they_see(folder: Path) -> None:
    """Guards against a device that Transformers' plans would not heed: it is refused before a rank loads anything."""
    build("llama").save_pretrained(folder)
    other = "cpu" if torch.cuda.is_available() else "meta"
    with pytest.raises(ModelError, match=f"cannot load to {other} while they see"):
        load(str(folder), device=other, ranks=2)


def test_models_without_a_plan_are_refused(folder: Path) -> None:
    """Guards architectures that Transformers cannot share: every rank would hold, and sum, the whole."""
    build("opt").save_pretrained(folder)
    with pytest.raises(ModelError, match="no tensor-parallel plan for opt"):
        check_ranks(str(folder), 2)


def test_ranks_of_one_machine_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards several GPUs in one machine: all ranks took the first one, and with too few they waited for each other."""
    started: list[dict[str, str]] = []

    class Stop(Exception):
        pass

    def start(command: list[str], env: dict[str, str]) -> Any:
        started.append(env)
        return SimpleNamespace(wait=lambda timeout: None)

    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    monkeypatch.setattr("cascade.engine.parallel.subprocess.Popen", start)
    monkeypatch.setattr(LeadingModel, "lead", stop)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(Stop):
        LeadingModel.launch(family.paths()[-1], 4)
    assert [env["LOCAL_RANK"] for env in started] == ["1", "2", "3"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match=r"is to be shared by 2 ranks, and 1 GPUs are seen: set tensor_parallel_size to 1$"):
        LeadingModel.launch(family.paths()[-1], 2)
