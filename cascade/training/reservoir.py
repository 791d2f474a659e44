"""Answers that drafters learn from: so many, not too old, by who asked. On disk only where that is told.

Only texts are kept, no log-probabilities: the learner scores them with its own copy of the verifier, so that no pass does more
than it would without. Half of the rows are the newest answers, the other half a sample of those before, in which an answer
counts by how often its drafts were corrected (weighted reservoir sampling, Efraimidis and Spirakis 2006).
"""

import gzip
import heapq
import json
import os
import random
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cascade.errors import ConfigError

ROWS = "rows.jsonl.gz"
SEALED = "rows.sealed"  # the same, encrypted
FORGOTTEN = "forgotten.jsonl"
HELD_OUT = 8  # one answer of so many is never learnt from, by its own tokens: the same one in every round


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    tokens: tuple[int, ...]  # of the prompt, then of the answer
    prompt_len: int
    temperature: float
    tenant: str  # name of the key that asked for it
    corrected: int  # times that a drafter was corrected
    time: float  # when it was complete, seconds since 1970

    def tail(self, most: int) -> "Sample":
        """Its last tokens, ``most`` of them."""
        cut = max(0, len(self.tokens) - most)
        return replace(self, tokens=self.tokens[cut:], prompt_len=max(1, self.prompt_len - cut)) if cut else self

    @property
    def held_out(self) -> bool:
        """Whether it judges, and is never learnt from."""
        return zlib.crc32(json.dumps(self.tokens).encode()) % HELD_OUT == 0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept."""

    rows: int = 2000
    row_tokens: int = 512  # the last ones of an answer with its prompt
    max_age_s: float = 7 * 86_400.0


class Reservoir:
    """Bounded, for one thread. Those who asked in ``folder`` to be forgotten are.

    If rows are ``kept``, those that were saved in the folder are here again, else they are removed. ``key`` is one of Fernet,
    by which the file is encrypted. Raises `ConfigError` if the file cannot be read with it.
    """

    def __init__(self, limits: Limits, folder: Path, key: str | None = None, *, kept: bool = True) -> None:
        self._limits, self._folder, self._seal = limits, folder, None if key is None else _fernet(key)
        self._kept = kept
        self._newest: deque[Sample] = deque()
        self._older: list[tuple[float, int, Sample]] = []  # a heap: of equal weights the one that came first goes first
        self._num_added = 0
        self._chance = random.Random(0)
        if not kept:
            for name in (ROWS, SEALED):
                (folder / name).unlink(missing_ok=True)
        elif read := self._read(folder):
            self.add(read)
            self.save()  # without those that are forgotten by now

    def __len__(self) -> int:
        return len(self._newest) + len(self._older)

    @property
    def num_added(self) -> int:
        """Answers that were ever taken."""
        return self._num_added

    @property
    def newest(self) -> list[Sample]:
        self._expire()
        return list(self._newest)

    @property
    def older(self) -> list[Sample]:
        self._expire()
        return [sample for _, _, sample in self._older]

    def add(self, samples: Iterable[Sample]) -> None:
        """Take answers; what there is no room for goes, the newest ones never before others."""
        forgotten = _marks(self._folder)
        for sample in samples:
            if sample.time <= forgotten.get(sample.tenant, 0.0):
                continue
            self._num_added += 1
            self._newest.append(sample.tail(self._limits.row_tokens))
            if len(self._newest) > -(-self._limits.rows // 2):
                old = self._newest.popleft()
                weight = self._chance.random() ** (1 / (1 + old.corrected))
                heapq.heappush(self._older, (weight, self._num_added, old))
            if len(self._older) > self._limits.rows // 2:
                heapq.heappop(self._older)
        self._expire()

    def forget(self) -> bool:
        """Drop the rows of those who asked for it, see `forget`, here and on disk; whether there were any."""
        marks, before = _marks(self._folder), len(self)
        self._keep(lambda sample: sample.time > marks.get(sample.tenant, 0.0))
        if changed := len(self) < before:
            self.save()
        return changed

    def save(self) -> None:
        """Write all rows to the folder, whole or not at all, if they are to be kept there."""
        if not self._kept:
            return
        self._expire()
        rows = [*self.older, *self._newest]
        content = gzip.compress("".join(json.dumps(asdict(row)) + "\n" for row in rows).encode())
        self._folder.mkdir(parents=True, exist_ok=True)
        name, other = (ROWS, SEALED) if self._seal is None else (SEALED, ROWS)
        partial = self._folder / f"{name}.partial"
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content if self._seal is None else self._seal.encrypt(content))
        os.replace(partial, self._folder / name)
        (self._folder / other).unlink(missing_ok=True)

    def _read(self, folder: Path) -> list[Sample]:
        path = next((folder / name for name in (SEALED, ROWS) if (folder / name).exists()), None)
        if path is None:
            return []
        if path.name == SEALED and self._seal is None:
            raise ConfigError(f"{path} is encrypted: give its key")
        try:
            content = path.read_bytes()
            plain = gzip.decompress(self._seal.decrypt(content) if path.name == SEALED and self._seal is not None else content)
            return [_sample(json.loads(line)) for line in plain.decode().splitlines()]
        except Exception as error:  # of the disk, of what lies there, or another key
            reason = str(error) or type(error).__name__
            raise ConfigError(f"{path} cannot be read ({reason}): give the key it was written with, or remove it") from None

    def _expire(self) -> None:
        oldest = time.time() - self._limits.max_age_s
        if any(sample.time < oldest for sample in (*self._newest, *(one[2] for one in self._older))):
            self._keep(lambda sample: sample.time >= oldest)

    def _keep(self, wanted: Any) -> None:
        self._newest = deque(sample for sample in self._newest if wanted(sample))
        self._older = [one for one in self._older if wanted(one[2])]
        heapq.heapify(self._older)


def forget(folder: Path, tenant: str) -> None:
    """Ask that whatever ``tenant`` has said up to now is forgotten; a learner that runs on ``folder`` does so in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FORGOTTEN).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"tenant": tenant, "time": time.time()}) + "\n")


def _marks(folder: Path) -> dict[str, float]:
    """Who is to be forgotten, up to when."""
    path = folder / FORGOTTEN
    lines: Sequence[str] = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    marks: dict[str, float] = {}
    for line in lines:
        said = json.loads(line)
        marks[said["tenant"]] = max(marks.get(said["tenant"], 0.0), float(said["time"]))
    return marks


def _sample(said: dict[str, Any]) -> Sample:
    return Sample(**said | {"tokens": tuple(said["tokens"])})


def _fernet(key: str) -> Any:
    try:
        from cryptography.fernet import Fernet
    except ImportError:
        raise ConfigError("Encrypted answers need the package cryptography: pip install 'cascade-serve[align]'") from None
    try:
        return Fernet(key)
    except ValueError as error:
        raise ConfigError(f"The key for answers is none of Fernet's ({error}): make one with Fernet.generate_key()") from None
