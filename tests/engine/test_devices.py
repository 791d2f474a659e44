"""What a device is fast with: a dtype that rounds no weight, and as many threads as a pass is worth."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cascade import ModelError
from cascade.cpu.processor import has_bfloat16
from cascade.engine.checkpoint import anatomy
from cascade.engine.devices import held_dtype
from cascade.engine.model import Model
from cascade.engine.model_config import read_config
from cascade.engine.network.published import keeps_bits
from cascade.engine.threads import LONG_S, Threads, apart, limited
from cascade.params import SamplingParams
from cascade.scorer import Row
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
        half = Model.from_pretrained(str(folder), dtype="bfloat16", device="cpu", cache_tokens=1024)
    assert half.dtype is torch.bfloat16, "what is asked for is honoured"
    assert caplog.text == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_told_before_loading_is_found(dtype: torch.dtype, folder: Path) -> None:
    """Guards `cascade check` against promising more, or less, than the replica that is started."""
    tier = {"name": "full", "model_loading_config": {"model_id": "m", "model_source": str(folder)}}
    config = CascadeConfig.parse({"tiers": [tier | {"engine_kwargs": {"device": "cpu", "dtype": str(dtype)[6:]}}]})
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    for name, changes in (("llama", sizes), ("mixtral", {}), ("minicpm3", {})):
        network = build(name, **changes).to(dtype)
        network.save_pretrained(folder)
        promised = keeps_bits(network, dtype)
        assert name == "llama" or not promised
        assert Model(network, cache_tokens=1024).same_bits == promised
        reasons = [
            remark for remark in remarks(needs(config)) if remark.startswith("Logits of tier full may differ in their last")
        ]
        assert bool(reasons) != promised


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


# threads of a pass


GREEDY = SamplingParams(temperature=0, seed=0)


class Machine:
    """A clock that passes move: ``work_s`` for each token, shared by the threads, and ``meet_s`` for each that they have.

    Of the passes with several threads all but each eighth take ``pause_s`` longer.
    """

    def __init__(self, work_s: float, meet_s: float, pause_s: float = 0.0) -> None:
        self.now, self.sizes = 0.0, list[int]()
        self.work_s, self.meet_s, self.pause_s = work_s, meet_s, pause_s

    def run(self, num_tokens: int) -> None:
        threads = torch.get_num_threads()
        self.sizes.append(num_tokens)
        self.now += self.work_s * num_tokens / threads + self.meet_s * (threads - 1)
        if threads > 1 and len(self.sizes) % 8:
            self.now += self.pause_s


@pytest.mark.parametrize(
    ("machine", "limit", "expected"),
    [
        (Machine(work_s=1e-4, meet_s=1e-3), 4, {1: {1}, 128: {2, 3, 4}, 512: {4}}),
        (Machine(work_s=1e-6, meet_s=0.0), 2, {1: {2}}),  # twice as fast is worth it
        (Machine(work_s=0.0, meet_s=1e-9), 2, {1: {1}}),
        (Machine(work_s=1e-4, meet_s=0.0, pause_s=0.05), 2, {32: {2}}),
        (Machine(work_s=5 * LONG_S, meet_s=0.0), 4, {1: {4}, 512: {4}}),
    ],
    ids=["small and large passes", "free threads", "useless threads", "a noisy neighbour", "a large model"],
)
def test_passes_take_the_fewest_threads_that_are_not_slower(
    machine: Machine, limit: int, expected: dict[int, set[int]]
) -> None:
    """Guards small models against threads that cost more than they bring, and timings against a noisy neighbour."""
    before = torch.get_num_threads()
    chosen = Threads.find(machine.run, limit, lambda: machine.now)
    assert all(chosen.count(size) in counts for size, counts in expected.items())
    assert [chosen.count(size) for size in range(1, 513)] == sorted(chosen.count(size) for size in range(1, 513))
    assert machine.work_s < LONG_S or machine.sizes == [1, 1]
    with pytest.raises(RuntimeError), limited(Threads(before + 1).count(1)):
        raise RuntimeError
    assert torch.get_num_threads() == before, "the caller's own setting, also after an error"


def test_a_number_that_is_given_holds_for_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ``num_threads`` against being taken for a hint."""
    model, seen = Model(build("llama"), num_threads=3), set()
    score = model.logits
    monkeypatch.setattr(model, "logits", lambda rows: seen.add(torch.get_num_threads()) or score(rows))
    for size in (1, 200):
        model.run([Row(model.new_cache(), 0, [1] * size, 1, GREEDY)])
    assert seen == {3}


def test_a_thread_that_ends_leaves_no_helpers() -> None:
    """Guards passes against OpenMP's helpers of the thread that loaded the model: with more of them than cores all sleep."""
    program = """if True:
        import os, time, torch
        from cascade.engine.threads import apart
        torch.set_num_threads(2)
        running = lambda: len(os.listdir("/proc/self/task"))
        before = running()
        assert apart(lambda: float(torch.ones(1000, 1000).sum())) == 1e6
        while running() > before:  # for ever, if they stay
            time.sleep(0.01)
        float(torch.ones(1000, 1000).sum())
        assert running() == before + 1
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(ModelError, match="nowhere at all"):
        apart(lambda: read_config("nowhere at all"))
