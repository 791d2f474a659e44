"""Kernels are tried in one thread and in two."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2], autouse=True, ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
