"""What a machine without vLLM says."""

import pytest

from cascade.engine.vllm.model import VllmModel
from cascade.errors import ConfigError
from cascade.settings.engine import EngineKwargs


def test_vllm_is_asked_for_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users against an ImportError: the sentence says what to install."""
    monkeypatch.setattr("cascade.engine.vllm.model.installed", lambda: False)
    with pytest.raises(
        ConfigError, match=r"engine is 'vllm', which is not installed here: pip install 'cascade-serve\[vllm\]'"
    ):
        VllmModel("anything")


@pytest.mark.parametrize(
    ("given", "gpu", "there", "expected"),
    [
        ({}, True, True, "vllm"),
        ({}, True, False, "cascade"),
        ({}, False, True, "cascade"),
        ({"engine": "cascade"}, True, True, "cascade"),
        ({"engine": "vllm"}, False, False, "vllm"),
        ({"quantization": "int8"}, True, True, "cascade"),
        ({"drafter": {"kind": "eagle3", "source": "a/b"}}, True, True, "cascade"),
        ({"tensor_parallel_size": 2}, False, False, "vllm"),
    ],
)
def test_the_engine_is_chosen(
    given: dict[str, object], gpu: bool, there: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the default: vLLM where it is installed and there is a GPU, unless only our own engine takes what is given."""
    monkeypatch.setattr("cascade.engine.vllm.installed", lambda: there)
    assert EngineKwargs.model_validate(given).runs_on(gpu=gpu) == expected
