"""What only a GPU can tell of our own engine. Skipped where there is none."""

import pytest
import torch

from cascade import SamplingParams, Speculation
from tests import small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cascades_keep_the_promise(temperature: float) -> None:
    """Guards the whole in float32: three tiers on one GPU, which share its memory."""
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4)
    with small.cascade(device="cuda") as cascade:
        for prompt in ("def read(path):\n", "import os\n\nclass Shape:\n"):
            alone = cascade.generate(prompt, params, Speculation("off"))
            assert cascade.generate(prompt, params).token_ids == alone.token_ids
