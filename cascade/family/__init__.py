"""The embedded demonstration family: one tokenizer, three Llama-architecture models, and the recipe that trains them.

The models complete Python code. They are small enough to ship in the package, and big enough to disagree with each other
as the models of real families do: tests, the demo and the benchmarks run on real text without a download.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""Folder with one subfolder per shipped model, each loadable by ``from_pretrained``."""

NAMES = ("tiny", "medium", "full")
"""The shipped models, bottom to top."""


HEAD = "eagle3"
"""The shipped drafter that reads the full model."""


def paths() -> list[str]:
    """Folders of the shipped models, bottom to top."""
    return [str(WEIGHTS / name) for name in NAMES]


def head() -> str:
    """Folder of the shipped drafter that reads the full model, as EAGLE-3 heads are published."""
    return str(WEIGHTS / HEAD)
