"""One model on both engines for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm.models import Pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from cascade.engine.model import Model
    from tests.vllm.models import Pair, saved, started  # which is there beside vLLM alone

    source = saved("llama", tmp_path_factory.mktemp("llama"))
    model = started(source, 2048)
    yield Pair(model, Model.from_pretrained(source, dtype="float32", device="cpu", cache_tokens=2048))
    model.close()
