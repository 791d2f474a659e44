"""What only a GPU can tell: PyTorch's kernel, captures by CUDA, and threads beside them. Skipped where there is none."""

import inspect
import random
from threading import Event, Thread

import pytest
import torch

from cascade import SamplingParams, Speculation
from cascade.engine.model import Model
from cascade.scorer import Row
from tests import small
from tests.architectures import VOCAB, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICE = "cuda"
PARAMS = [
    SamplingParams(temperature=0, seed=0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_k=7, top_p=0.9, min_p=0.05),
]


def load(name: str, dtype: torch.dtype) -> Model:
    return Model(build(name).to(DEVICE, dtype), cache_tokens=2**14)


def compare(model: Model, rounds: int = 30) -> tuple[int, int]:
    """Own tokens that captured passes of random rows choose, and how many of them uncaptured passes choose, too."""
    rng, caches, held = random.Random(0), [model.new_cache() for _ in range(5)], [0] * 5
    chosen = same = 0
    for _ in range(rounds):
        rows = []
        for place in rng.sample(range(5), rng.randint(1, 5)):
            start, n = rng.randint(0, min(held[place], 90)), rng.randint(1, 12)
            tokens = [rng.randrange(VOCAB) for _ in range(n)]
            rows.append(Row(caches[place], start, tokens, rng.randint(1, n), rng.choice(PARAMS)))
            held[place] = start + n
        for own, other in zip(model.run(rows), model._score(rows), strict=True):
            chosen += len(own.own)
            same += sum(one == two for one, two in zip(own.own, other.own, strict=True))
    return chosen, same


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-sliding", "gemma2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1.0), (torch.bfloat16, 0.95)], ids=["float32", "bfloat16"])
def test_graphs_choose_what_passes_do(name: str, dtype: torch.dtype, share: float) -> None:
    """Guards captures by CUDA, and the kernel: in float32 every token, in bfloat16 all but near-ties."""
    chosen, same = compare(load(name, dtype))
    assert same >= share * chosen


def test_the_kernel_is_used_where_it_is_there() -> None:
    """Guards the path that is meant for GPUs against another that works as well, and is slower."""
    from torch.nn.attention.varlen import varlen_attn

    there = "block_table" in inspect.signature(varlen_attn).parameters and torch.cuda.get_device_capability() >= (8, 0)
    assert load("llama", torch.bfloat16).path == ("varlen, captured" if there else "gathered, captured")
    assert load("llama", torch.float32).path == "gathered, captured"
    assert load("gpt2", torch.float32).path == "gathered"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cascades_keep_the_promise(temperature: float) -> None:
    """Guards the whole in float32: three tiers on one GPU, which share its memory."""
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4)
    with small.cascade(device=DEVICE) as cascade:
        for prompt in ("def read(path):\n", "import os\n\nclass Shape:\n"):
            alone = cascade.generate(prompt, params, Speculation("off"))
            assert cascade.generate(prompt, params).token_ids == alone.token_ids


def test_models_are_loaded_beside_one_that_serves() -> None:
    """Guards captures against the passes of other threads, and these against captures."""
    serving, stop, failed = load("llama", torch.float32), Event(), []

    def serve() -> None:
        while not stop.is_set():
            chosen, same = compare(serving, rounds=1)
            if chosen != same:
                failed.append((chosen, same))

    def start() -> None:
        chosen, same = compare(load("qwen2", torch.float32))
        if chosen != same:
            failed.append((chosen, same))

    threads = [Thread(target=serve), *(Thread(target=start) for _ in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert failed == []
