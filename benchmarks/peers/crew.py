"""Processes of a benchmark: workers that answer JSON lines, of which one computes at a time, and servers."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.contract import Said, Setup, Turn

ROOT = Path(__file__).parents[2]
LOAD_S = 1200.0  # vLLM compiles each model once
TURN_S = 600.0
PARTING_S = 60.0  # Ray takes half of it on a busy machine
LOOK_S = 0.5


class WorkerFailed(Exception):
    """A worker ended, or said that it cannot; its message is the reason."""


class Process:
    """A program in a group of processes of its own, which ends with this object."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, piped: bool) -> None:
        """Start it. Its output goes to ``log``; if ``piped``, only its errors do."""
        self._log = log
        pipe = subprocess.PIPE if piped else None
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or file,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def processor_s(self) -> float:
        """Seconds that its processes have computed."""
        return sum(_processor_s(path, self._process.pid) for path in Path("/proc").glob("[0-9]*/stat"))

    def close(self) -> None:
        """Let it end, and then whatever it has left behind; again is harmless."""
        self.part()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PARTING_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def part(self) -> None:
        """Tell it to end."""
        self._signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        """The last line that it wrote."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"it ended: {lines[-1] if lines else 'without a word'}"


class Talker(Process):
    """A program that answers each line by one JSON document."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(command, environment, log, piped=True)

    def greeting(self) -> dict[str, Any]:
        """What it says before it is asked, when it is ready. Raises `WorkerFailed`."""
        return self._hear(LOAD_S)

    def tell(self, document: object) -> dict[str, Any]:
        """Its answer. Raises `WorkerFailed` if it says that it cannot, or is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
            return self._hear(TURN_S)
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None

    def part(self) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _hear(self, patience_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], patience_s)
        if not ready:
            raise WorkerFailed(f"no answer in {patience_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        heard: dict[str, Any] = json.loads(line)
        if "error" in heard:
            raise WorkerFailed(heard["error"])
        return heard


class Worker(Talker):
    """One engine, loaded; all its processes are stopped while it is not asked, so that none spins."""

    def __init__(self, setup: Setup, python: str, environment: Mapping[str, str]) -> None:
        """Start it: ``python`` is the interpreter of its environment."""
        command = [python, "-m", "benchmarks.peers.worker", json.dumps(asdict(setup))]
        super().__init__(command, environment, Path(setup.work) / f"{setup.engine}-{setup.modes[0]}.log")
        self.setup = setup
        self.versions: dict[str, str] = {}

    def load(self) -> Self:
        """Return when the engine is loaded. Raises `WorkerFailed`."""
        self.versions = self.greeting()["versions"]
        self._signal(signal.SIGSTOP)
        return self

    def ask(self, turn: Turn) -> Said:
        """Raises `WorkerFailed` if the engine does, or is gone."""
        before = self.processor_s()
        self._signal(signal.SIGCONT)
        try:
            answer = Said(**self.tell(asdict(turn)))
            return replace(answer, processor_s=self.processor_s() - before)
        finally:
            self._signal(signal.SIGSTOP)


class Server(Process):
    """An HTTP server, which is told to end as by Ctrl-C."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, url: str) -> None:
        """Start it, and return when it lists its models at ``url``. Raises `WorkerFailed`."""
        super().__init__(command, environment, log, piped=False)
        try:
            self.model = self._ready(url)
        except BaseException:
            self.close()
            raise

    def _ready(self, url: str) -> str:
        """The model that it serves."""
        end = time.monotonic() + LOAD_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise WorkerFailed(self._last_words())
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                with urllib.request.urlopen(f"{url}/v1/models", timeout=LOOK_S) as answer:
                    model: str = json.load(answer)["data"][0]["id"]
                return model
            time.sleep(LOOK_S)
        raise WorkerFailed(f"no answer at {url} in {LOAD_S:.0f} s")


def _processor_s(path: Path, group: int) -> float:
    """Seconds that a process of ``group`` has computed, and its children that have ended."""
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if int(fields[2]) == group else 0.0
