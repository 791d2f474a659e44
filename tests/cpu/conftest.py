"""Kernels are tried in one thread, and by `make test-all` in two; `tests/engine/test_pass.py` tries all of a pass in two."""

from collections.abc import Iterator

import pytest
import torch

from tests.cases import rare


@pytest.fixture(params=[pytest.param(1, id="1 thread"), rare(2, id="2 threads")], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
