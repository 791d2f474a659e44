"""Environments of peers, each with packages of its own: `make bench-peers` makes them, with the versions in the Makefile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Missing(Exception):
    """A peer cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment at the root of the repository."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)  # of its processes

    @property
    def python(self) -> str:
        """Its interpreter. Raises `Missing` if it is not installed."""
        folder = ROOT / self.name
        if not (folder / ".installed").exists():
            raise Missing(f"{self.name} is not installed: make {self.name}/.installed says why")
        return str(folder / "bin" / "python")


VLLM = Environment(
    ".venv-vllm",
    {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as all others: a thread on a core of its own waits for who else is there
        "KMP_BLOCKTIME": "5",  # milliseconds; as vLLM sets it for threads that it binds
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        # Intel's OpenMP, which comes with the wheel, is to be loaded first.
        "LD_PRELOAD": str(ROOT / ".venv-vllm" / "lib" / "libiomp5.so"),
    },
)
LLAMA = Environment(".venv-llama")
