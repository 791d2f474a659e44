"""One model over several processes: the text of one rank, and clean ends when a rank is lost."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from cascade import ModelError
from cascade.engine.attention import Contiguous
from cascade.engine.contiguous_cache import Cache, Fork
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.parallel import PARAMS, Book, LeadingModel, RankCache, check_ranks, mirror
from cascade.scorer import Row
from tests import small
from tests.architectures import VOCAB, build
from tests.cases import rare
from tests.conftest import LONG_S
from tests.engine import leading
from tests.forks import Piece, check_forks, tokens

Said = dict[str, Any]


@pytest.fixture(scope="module")
def leader() -> Iterator[Callable[..., Said]]:
    """Runs a function in a process that leads, one after the other: ranks find each other through the state of a process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield lambda work, *args: process.submit(work, *args).result(LONG_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.mark.slow  # in the default run those with quantised weights stand for them
@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("qwen3", 4), ("mixtral", 2)])
def test_ranks_write_what_one_would(leader: Callable[..., Said], folder: Path, name: str, ranks: int) -> None:
    """Guards heads, keys and values shared among ranks: chunks, drafts, rollbacks and companions as on one."""
    build(name, num_key_value_heads=4).save_pretrained(folder)
    said = leader(leading.write, str(folder), ranks)
    assert said["same"] == [True, True]
    assert said["again"]
    assert said["ended"] == [0] * (ranks - 1)


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), rare("qwen3", 4), rare("mixtral", 2)])
def test_ranks_share_quantised_weights(leader: Callable[..., Said], folder: Path, name: str, ranks: int) -> None:
    """Guards shares against scales of their own: layers that are split along their input would hold other numbers."""
    build(name, num_key_value_heads=4).save_pretrained(folder)
    said = leader(leading.write, str(folder), ranks, "int8")
    assert said["same"] == [True, True]
    assert said["again"]
    assert said["error"] < 1e-4, "rounding of sums alone; scales of their own make it 0.05"


@pytest.mark.parametrize("seed", range(3))
def test_ranks_hold_what_the_leader_holds(seed: int) -> None:
    """Guards the others' shares of keys and values: they must fork, join and free as the leader's do, and keep nothing."""
    model = Model(build("llama").to(torch.bfloat16), attention=Contiguous(), num_threads=1)
    book = Book()
    caches: dict[int, Cache | Fork] = {}

    def hear() -> None:
        for change in book.changes:
            mirror(caches, change)
        book.changes.clear()

    def score(pieces: Sequence[Piece]) -> Sequence[Tensor]:
        hear()
        said = []
        for stores in ([p.store for p in pieces], [caches.setdefault(p.store.number, Cache()) for p in pieces]):
            fed = [(store, piece.start, tokens(piece, VOCAB)) for store, piece in zip(stores, pieces, strict=True)]
            said.append(model.logits([Row(store, start, text, len(text), PARAMS) for store, start, text in fed]))
        assert torch.equal(*said)
        return said[0].split([len(piece.picks) for piece in pieces])

    check_forks(random.Random(seed), lambda: RankCache(book), score, 90)
    hear()
    assert not caches


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's own
def test_ranks_share_adapters(leader: Callable[..., Said], folder: Path) -> None:
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
    said = leader(leading.adapt, str(folder), 2, {name: str(folder.parent / name) for name in ("red", "blue")})
    assert said["same"]
    assert said["different"] == 3
    assert said["ended"] == [0]


def test_a_lost_rank_ends_the_model(leader: Callable[..., Said], folder: Path) -> None:
    """Guards against a replica that hangs or goes on with half a model when a rank is killed."""
    build("llama").save_pretrained(folder)
    said = leader(leading.lose, str(folder), 2)
    assert not said["healthy"]
    assert "full" in said["error"]


@pytest.mark.parametrize(
    ("ranks", "words"), [(3, "does not divide the 12 heads and 4 key/value heads .*: take one of 1, 2, 4$"), (8, "take one of")]
)
def test_sizes_that_do_not_divide_the_heads_are_refused(ranks: int, words: str) -> None:
    """Guards the start: nothing is launched, and the sizes that fit are named."""
    with pytest.raises(ModelError, match=f"tensor_parallel_size is {ranks}.*{words}"):
        LeadingModel.launch(small.paths()[-1], ranks)


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
        LeadingModel.launch(small.paths()[-1], 4)
    assert [env["LOCAL_RANK"] for env in started] == ["1", "2", "3"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match=r"is to be shared by 2 ranks, and 1 GPUs are seen: set tensor_parallel_size to 1$"):
        LeadingModel.launch(small.paths()[-1], 2)
