"""One model on both engines for all tests of a file; and no tests of vLLM where it is not installed."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm.models import Pair

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_[!bkw]*.py"]  # blocks, kernels, and what is said without vLLM
else:
    with warnings.catch_warnings(action="ignore"):
        import vllm  # noqa: F401  # warns of itself and of what it imports


def pytest_itemcollected(item: pytest.Item) -> None:
    """To start vLLM takes long, and warns."""
    item.add_marker(pytest.mark.filterwarnings("ignore"))
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from cascade.engine.model import Model
    from tests.vllm.models import Pair, saved, started  # need vLLM

    source = saved("llama", tmp_path_factory.mktemp("llama"))
    with closing(started(source, 2048)) as model:
        yield Pair(model, Model.from_pretrained(source, dtype="float32", device="cpu", cache_tokens=2048))
