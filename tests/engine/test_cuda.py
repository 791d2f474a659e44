"""Whole passes on a GPU that is not there: PyTorch's fake tensors know devices, dtypes and shapes, and have no numbers.

They refuse what a GPU would: tensors of two devices in one operation, and numbers that the host looks at.
"""

import copy
import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from cascade.engine.attention import Gathered, Paged, Varlen
from cascade.engine.devices import add_exactly
from cascade.engine.graphs import Bucket, Recorder, Task, Watch
from cascade.engine.kernels import Summed
from cascade.engine.kv import Span
from cascade.engine.model import Model
from cascade.engine.paged_cache import Blocks
from cascade.engine.sampling import Choice
from cascade.engine.sequence_state import SequenceState
from cascade.engine.survey import SURVEY
from cascade.errors import ModelError
from cascade.messages import Open
from cascade.params import SamplingParams
from cascade.scorer import BLOCK, Row
from tests.architectures import SERVED, VOCAB, build, config, each
from tests.engine.test_graphs import _sealed
from tests.engine.test_pass import NOT_FOR_KERNELS
from tests.fakes import faked, guarded
from tests.kernels import varlen

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FEW = [Bucket(1, 1), Bucket(4, 1), Bucket(1, 4), Bucket(4, 4)]
PARAMS = [
    SamplingParams(temperature=0, seed=0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_k=7, top_p=0.9, min_p=0.05),
]
LOOKING = {"gpt2", "gpt2-scaled", "llama-dynamic", "longcat_flash"}  # at numbers, in their passes
COPYING = {"jetmoe", "phimoe"}  # to the host or from it, in their passes; a CPU does without


def watched(work: Task) -> Task:
    """As far as a capture can be had without a GPU: what could not be captured raises."""
    with Watch():
        work()
    return work


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with guarded(tmp_path_factory.mktemp("guard")):
        yield


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cascade.engine.graphs.BUCKETS", FEW)


def kernel() -> Any:
    """PyTorch's own, which has a fake of itself, where it takes block tables; else one that stands for it."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else _sealed


def moved(name: str, attention: Paged, like: Paged) -> Model:
    """A model on the GPU; what it is like is found out on the CPU, by ``like``. In a mode of fake tensors."""
    model = copy.copy(found(name, like))
    with torch.device(CUDA):
        network = AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16).eval()
    network.set_attn_implementation(attention.name)
    model._network, model.device, model.dtype, model._attention = network, CUDA, torch.bfloat16, attention
    model._pass = model._score
    cache = model.new_cache()
    model.logits([Row(cache, 0, [1, 2, 3], 1, PARAMS[0])])
    cache.free()
    attention.hold(4096)
    return model


def found(name: str, like: Paged) -> Model:
    with unset_fake_temporarily():
        return Model(build(name), attention=like, cache_tokens=1024)


def ways() -> list[tuple[Paged, Paged]]:
    """Of the GPU, and of the CPU to find out with."""
    return [
        (Varlen(kernel(), CUDA), Varlen(varlen, CPU, BLOCK)),
        (Varlen(Summed(kernel()), CUDA), Varlen(varlen, CPU, BLOCK)),
        (Gathered(), Gathered(BLOCK)),
    ]


@pytest.mark.parametrize("way", [0, 1, 2], ids=["varlen", "summed", "gathered"])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", each(["llama", "qwen2-sliding"], default=["qwen2-sliding"]))
def test_passes_stay_on_their_device(name: str, captured: bool, way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first pass on a GPU: no tensor of the host in it, none that must be looked at, and one read at its end."""
    attention, like = ways()[way]
    for params in PARAMS:
        Choice.of(params, VOCAB)  # keeps what it works out on the host
    with faked(monkeypatch) as reads, torch.inference_mode():
        model = moved(name, attention, like)
        if captured:
            model._pass = model._captured(watched)
        assert model.path.endswith(", captured") == captured
        caches = [model.new_cache() for _ in PARAMS]
        passes = [
            [Row(cache, 0, [3, 4, 5], n, params) for n, (cache, params) in enumerate(zip(caches, PARAMS, strict=True))],
            [Row(cache, 3, [6], 1, params, ahead=3) for cache, params in zip(caches, PARAMS, strict=True)],
            [Row(caches[0], 4, [7], 1, PARAMS[0], ahead=1)],
            [Row(caches[0], 2, [6, 7, 8, 9], 4, PARAMS[0])],
            [Row(caches[2], 2, list(range(40)), 40, PARAMS[2])],
        ]
        for rows in passes:
            del reads[:]
            scored = model.run(rows)
            assert len(reads) == 1
            assert [len(one.own) for one in scored] == [row.num_own for row in rows]
        caches[1].take(caches[2], 30)  # a copy of the last block
        assert caches[1].table != caches[2].table


class Free:
    """A grammar that allows everything; its masks are the host's."""

    def rewind(self, num_tokens: int) -> None: ...

    def allowed(self, output: Sequence[int], guesses: Sequence[int], vocab_size: int) -> torch.Tensor:
        return torch.ones(1 + len(guesses), vocab_size, dtype=torch.bool)


def test_shaped_rows_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards bias, penalties, masks and log-probabilities: they keep tensors of their own from pass to pass."""
    asked = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1, "min_tokens": 3, "logprobs": 2}
    params = SamplingParams(temperature=0.7, seed=1, logit_bias={5: 2.0}, stop_token_ids=(9,), **asked)  # type: ignore[arg-type]
    Choice.of(params, VOCAB)
    for constraint in (None, Free()):
        with faked(monkeypatch) as reads, torch.inference_mode():
            model = moved("llama", *ways()[0])
            text = [3, 4, 5]
            state, cache = (
                SequenceState(Open("s", tuple(text), 3, params, ends=frozenset({9})), text, constraint),
                model.new_cache(),
            )
            model.run([Row(cache, 0, text, 1, params, state)])
            text += [7, 8]
            model.run([Row(cache, 3, [7, 8], 2, params, state), Row(model.new_cache(), 0, [1], 1, PARAMS[0])])
            assert len(reads) == 2 * (1 + 3)  # own tokens; log-probabilities, and the likeliest with theirs


@pytest.mark.parametrize("name", each(sorted(set(SERVED) - LOOKING - COPYING), default=("gpt_oss", "deepseek_v3")))
def test_architectures_stay_on_their_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards architectures whose own code would mix devices, or copy between them, in a pass or while they are looked at."""
    seen: list[torch.device] = []

    def look(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        seen.append(query.device)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("cascade.engine.graphs.BUCKETS", FEW[1:2])
    with faked(monkeypatch) as reads, torch.inference_mode():
        model = moved(name, Gathered(), Gathered(BLOCK))
        model._pass = model._captured(watched)
        assert model.path == "gathered, captured"
        monkeypatch.setitem(AttentionInterface._global_mapping, SURVEY, look)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, SURVEY, lambda **_: torch.zeros(1, 1, 1, 1))
        model._network.set_attn_implementation(SURVEY)
        model._network(input_ids=torch.zeros(1, 2, dtype=torch.long, device=CUDA), use_cache=False)
    assert set(seen) == {CUDA}
    assert reads == []


def test_the_host_cannot_be_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: what it is there to find, it finds."""
    attention, like = ways()[0]
    with faked(monkeypatch), torch.inference_mode():
        model = moved("llama", attention, like)
        rows = [Row(model.new_cache(), 0, [3], 1, PARAMS[0])]

        def refused(attend: Any, message: str) -> None:
            monkeypatch.setattr(model, "_forward", lambda ids, *rest: attend(ids))
            with pytest.raises(Exception, match=message):
                model._score(rows)

        refused(lambda ids: ids + torch.zeros(3), r"two.* devices,? cuda:0(,| and) cpu")
        refused(lambda ids: ids[:, : int(ids.sum())], "local_scalar_dense")


@pytest.mark.parametrize("name", each())
@pytest.mark.parametrize("way", ["varlen", "gathered"])
def test_what_can_be_captured_is_known(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards capture, and the docs: a model that looks at numbers is told before a capture that it would spoil."""
    if way == "varlen" and name in NOT_FOR_KERNELS:
        pytest.skip("the kernel does not take it")
    attention = Gathered(BLOCK) if way == "gathered" else Varlen(_sealed, CPU, BLOCK)
    model = Model(build(name), attention=attention, capture=watched, cache_tokens=1024)
    assert model.path.endswith(", captured") == (name not in LOOKING), caplog.text


class Driver:
    """What of `torch.cuda` a capture uses, as far as order and threads go; a capture that was broken ends as PyTorch's does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.capturing, self.most, self.broken = "default", 0, 0, False
        for name in ("graph_pool_handle", "CUDAGraph"):
            patch.setattr(torch.cuda, name, lambda: SimpleNamespace(replay=None))
        patch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
        patch.setattr(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(name=self.current, wait_stream=lambda _: None)
        )
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, getattr(stream, "name", "side")
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, **_: Any) -> Iterator[None]:
        before, self.current = self.current, "capturing"
        self.capturing += 1
        self.most = max(self.most, self.capturing)
        time.sleep(0.01)
        yield
        self.capturing -= 1
        if self.broken:
            raise RuntimeError("capture was invalidated")
        self.current = before


def test_captures_leave_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards threads that load at the same time, and the stream that goes on after a capture that failed."""
    driver = Driver(monkeypatch)
    recorders = [Recorder(CUDA) for _ in range(4)]
    threads = [Thread(target=partial(recorder, lambda: None)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (driver.most, driver.capturing) == (1, 0)
    driver.broken = True
    with pytest.raises(RuntimeError, match="capture was invalidated"):
        recorders[0](lambda: None)
    assert driver.current == "default"
    ran: list[int] = []
    with pytest.raises(RuntimeError, match="looks at numbers on the host"):
        recorders[0](lambda: ran.append(int(torch.ones(1))))
    assert (ran, driver.most) == ([], 1)


def test_sums_are_worked_out_once_a_pass() -> None:
    """Guards small models: three more kernels in every layer are a tenth of their step."""
    asked = []

    def wants(query: Any, key: Any, value: Any, ends: Any, sums: torch.Tensor, *_: Any, **options: Any) -> None:
        asked.append(sums)

    model = Model(build("llama"), attention=Varlen(varlen, CPU, BLOCK), cache_tokens=1024)
    cache, summed = model.new_cache(), Summed(wants)
    plans = [model._attention.plan([Span(cache, 0, 3, start)], model._windows) for start in (0, 3)]
    for plan in (*plans, plans[0]):
        for _ in range(2):
            summed(None, None, None, plan.tables.ends, None, 3, 6, seqused_k=plan.tables.lengths)  # type: ignore[arg-type]
    assert [sums.tolist() for sums in asked] == [[0, 3]] * 2 + [[0, 6]] * 2 + [[0, 3]] * 2
    assert asked[0] is asked[1] is not asked[2] is asked[3]


def test_products_are_added_up_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards texts in 16 bits: parts of a product that are joined in 16 make passes of different sizes differ the more."""
    matmul = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        before = getattr(matmul, name)
        add_exactly(CPU)
        assert getattr(matmul, name) == before
        add_exactly(CUDA)
        assert getattr(matmul, name) is False
        setattr(matmul, name, before)


def test_a_cache_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the sentence: a number of tokens that the device has no memory for."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99.00 GiB")

    monkeypatch.setattr(Blocks, "resized", full)
    with pytest.raises(ModelError, match=r"^cpu has no memory for a cache of 4096 tokens: set cache_tokens to fewer$"):
        Model(build("llama"), attention=Gathered(BLOCK), cache_tokens=4096)
