"""One step of the programme in this process: ``python -m benchmarks.gpu.step NAME --out FOLDER [--small]``.

A step writes FOLDER/NAME.json anew whenever it has a figure: whatever stops it later, what it has measured is there.
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import console, keep
from benchmarks.gpu import inflate
from cascade import family


@dataclass(frozen=True, slots=True)
class Step:
    """A step: a function of that name in a module beside this one."""

    name: str
    module: str
    limit_s: float  # on a GPU
    variables: dict[str, str] = field(default_factory=dict)  # its environment on a GPU has them, too


STEPS = (  # what shows most goes first
    Step("warm", "engines", 40),
    Step("server", "servers", 110),
    Step("kill", "servers", 110),
    Step("graphs", "engines", 220),
    Step("versus", "servers", 150),
    Step("text", "learning", 90),
    Step("train", "learning", 120),
    Step("library", "engines", 90),
    Step("invariant", "engines", 70, {"VLLM_BATCH_INVARIANT": "1"}),
    Step("fp8", "engines", 80),
    Step("own", "engines", 60),
)
SMALL_SHAPE = inflate.Shape(hidden=768, layers=31, heads=12, kv_heads=3, inner=1792)


@dataclass(slots=True)
class Notes:
    """What a step has measured so far, in ``folder``; ``small`` sizes are for a machine without a GPU."""

    folder: Path
    name: str
    small: bool
    results: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.perf_counter)

    def keep(self, **figures: Any) -> None:
        """Add figures, and write all that there are."""
        self.results |= figures | {"seconds": round(time.perf_counter() - self.begin, 1)}
        keep(self.results, self.folder / f"{self.name}.json")
        console.print(self.name, figures)

    @property
    def dtype(self) -> str:
        return "float32" if self.small else "bfloat16"

    def options(self, **further: Any) -> dict[str, Any]:
        """vLLM's engine arguments of a model, beside which two more have room on a GPU."""
        mine: dict[str, Any] = (
            {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
            if self.small
            else {"gpu_memory_utilization": 0.3}
        )
        return {"dtype": self.dtype, "max_model_len": 2048, **mine, **further}

    def inflated(self) -> str:
        """Folder of the family's full model at the shapes of one of 8 billion parameters, or a little above its own."""
        return inflate.write(family.full(), SMALL_SHAPE if self.small else "8b", self.folder / "inflated")


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu.step")
    made.add_argument("name", choices=[step.name for step in STEPS])
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--small", action="store_true")
    chosen = made.parse_args(arguments)
    step = next(step for step in STEPS if step.name == chosen.name)
    work: Callable[[Notes], None] = getattr(importlib.import_module(f"benchmarks.gpu.{step.module}"), step.name)
    chosen.out.mkdir(parents=True, exist_ok=True)
    notes = Notes(chosen.out.absolute(), step.name, chosen.small)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    notes.keep(device=device, torch=torch.__version__)
    work(notes)
    notes.keep(complete=True)


if __name__ == "__main__":
    main()
