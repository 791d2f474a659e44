"""Workers in processes of their own, of which one computes at a time: all others are stopped, so that none spins."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.contract import Said, Setup, Turn

ROOT = Path(__file__).parents[2]
LOAD_S = 1200.0  # vLLM compiles each model once
TURN_S = 600.0
PARTING_S = 20.0


class WorkerFailed(Exception):
    """A worker ended, or said that it cannot; its message is the reason."""


class Worker:
    """One engine, loaded. Its processes are a group, stopped as one."""

    def __init__(self, setup: Setup, python: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start and load it: ``python`` is the interpreter of its environment. Raises `WorkerFailed`."""
        self.setup = setup
        self._log = Path(setup.work) / f"{setup.engine}-{'-'.join(setup.modes)}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*python, "-m", "benchmarks.peers.worker", json.dumps(asdict(setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            self.versions: dict[str, str] = self._hear(LOAD_S)["versions"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, turn: Turn) -> Said:
        """Raises `WorkerFailed` if the engine does, or is gone."""
        assert self._process.stdin is not None
        before = self.processor_s()
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(asdict(turn)).encode() + b"\n")
            self._process.stdin.flush()
            said = Said(**self._hear(TURN_S))
            return replace(said, processor_s=self.processor_s() - before)
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        finally:
            self._signal(signal.SIGSTOP)

    def processor_s(self) -> float:
        """Seconds that its processes have computed."""
        return sum(_processor_s(path, self._process.pid) for path in Path("/proc").glob("[0-9]*/stat"))

    def close(self) -> None:
        """Let the engine end, and then whatever it has left behind."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PARTING_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._process.pid, number)

    def _hear(self, patience_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + patience_s
        ready, _, _ = select.select([self._process.stdout], [], [], end - time.monotonic())
        if not ready:
            raise WorkerFailed(f"no answer in {patience_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        heard: dict[str, Any] = json.loads(line)
        if "error" in heard:
            raise WorkerFailed(heard["error"])
        return heard

    def _last_words(self) -> str:
        """The last line that it wrote."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"it ended: {lines[-1] if lines else 'without a word'}"


def _processor_s(path: Path, group: int) -> float:
    """Seconds that a process of ``group`` has computed, and its children that have ended."""
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if int(fields[2]) == group else 0.0
