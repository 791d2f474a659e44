"""What benchmarks are made of still works: they run rarely, and for minutes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device_metrics, gpu, scale, vs_transformers


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for_in_one_sentence() -> None:
    """Guards machines without one against a traceback, and against figures that mean nothing."""
    with pytest.raises(SystemExit, match=r"^bench-gpu needs an NVIDIA GPU[^\n]*$"):
        gpu.main([])


def test_the_gpu_benchmark_works_before_there_is_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first run on a GPU, which may be the only one for long: every part but the device's own profile."""
    gpu.main(["--device", "cpu", "--shape", "tiny", "--results", str(tmp_path / "gpu.json")])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "gpu.json").read_text())
    found = document["shapes"]["tiny"]
    assert found["problems"] == []
    assert set(gpu.WANTED) - set(found) == {"device_gap_ms"}
    assert document["bfloat16_cascade"]["problems"] == []
    assert found["bfloat16_exactness"]["compared"] == 8
    assert document["float32_exactness"]["problems"] == []
    assert document["float32_exactness"]["same_text"]
    assert document["float32_exactness"]["accepted"] > 0


def test_what_fails_on_a_gpu_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long runs: a compiler that is not there, a part that breaks and a model too large cost themselves alone."""
    whole, results = vs_transformers.generate, tmp_path / "gpu.json"

    def generate(*args: Any, **options: Any) -> list[int]:
        if "cache_implementation" in options:
            raise RuntimeError("no compiler")
        return whole(*args, **options)

    def broken(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vs_transformers, "generate", generate)
    monkeypatch.setattr(gpu, "batching", broken)
    monkeypatch.setattr(gpu, "same_text", broken)
    device, small = torch.device("cpu"), replace(scale.SMALL, tokens=9)
    build = gpu.build
    monkeypatch.setattr(gpu, "build", lambda shape, *rest: broken() if shape is gpu.SHAPES["7b"] else build(shape, *rest))
    document = json.loads(json.dumps(gpu.measure(["7b", "tiny"], device, small, results)))
    assert document == json.loads(results.read_text())
    assert document["shapes"]["7b"] == {"problems": ["OutOfMemoryError: CUDA out of memory"]}
    found = document["shapes"]["tiny"]
    assert found["problems"] == ["OutOfMemoryError: CUDA out of memory", "generate_static: RuntimeError: no compiler"]
    assert set(gpu.WANTED) - set(found) == {"device_gap_ms", "batch_vs_generate_batch", "decode_vs_generate_static"}
    assert len(gpu.table(document).columns) == 4


def test_a_device_waits_between_its_graphs() -> None:
    """Guards the gap that is asked for: lulls between the kernels of one graph are not the host's."""
    assert device_metrics.idle_s(
        [(0.0, 1e-3), (1.002e-3, 2e-3), (2.5e-3, 3e-3), (2.6e-3, 2.7e-3), (3.1e-3, 4e-3)]
    ) == pytest.approx(0.6e-3)
