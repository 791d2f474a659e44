"""A model at the shapes of a larger one says what the small one says."""

from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.gpu import inflate
from benchmarks.vllm import written
from tests.architectures import VOCAB, build
from tests.vllm.models import started

SMALL = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "tie_word_embeddings": True}
LARGE = inflate.Shape(hidden=192, layers=4, heads=12, kv_heads=3, inner=224)


def test_an_inflated_model_writes_what_its_source_writes(tmp_path: Path) -> None:
    """Guards figures of large models: with a head, a norm or a dead column in the wrong place they are of another text."""
    network = build("llama", **SMALL)
    network.config.architectures = [type(network).__name__]
    network.save_pretrained(source := tmp_path / "source")
    inflate.register()
    folder = inflate.write(str(source), LARGE, tmp_path / "inflated")
    with closing(started(str(source))) as small, closing(started(folder, load_format=inflate.FORMAT)) as large:
        assert large.num_parameters > 3 * small.num_parameters
        for first in range(4):
            prompt = [(first + 7 * place) % VOCAB for place in range(12)]
            assert written(small, prompt, 40) == written(large, prompt, 40)


def test_a_source_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Guards against a live block that is cut off without a word."""
    build("llama", **SMALL).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="fits into"):
        inflate.write(str(tmp_path / "source"), inflate.Shape(192, 1, 12, 3, 224), tmp_path / "inflated")
