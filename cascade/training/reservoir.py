"""Answers that drafters learn from, bounded in number and age, each with its tenant; on disk only if configured.

Only texts are kept, no log-probabilities: the learner scores them with its own copy of the verifier, so serving needs no extra
work. Half of the rows are the newest answers. The other half is a sample of earlier ones, weighted by how often their drafts
were corrected (weighted reservoir sampling, Efraimidis and Spirakis 2006).
"""

import gzip
import heapq
import json
import math
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cascade.errors import ConfigError, reason
from cascade.training.versions import replacing

ROWS = "rows.jsonl.gz"
SEALED = "rows.sealed"  # the same, encrypted
FORGOTTEN = "forgotten.jsonl"
HELD_OUT = 8  # one answer in this many is never learned from; its tokens decide, so it is the same in every round


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    tokens: tuple[int, ...]  # the prompt's, then the answer's
    prompt_len: int
    temperature: float
    tenant: str  # name of the API key
    corrected: int  # times that a drafter was corrected
    time: float  # time of its completion, seconds since 1970

    def tail(self, most: int) -> "Sample":
        """The answer cut to its last ``most`` tokens."""
        cut = max(0, len(self.tokens) - most)
        return replace(self, tokens=self.tokens[cut:], prompt_len=max(1, self.prompt_len - cut)) if cut else self

    @property
    def held_out(self) -> bool:
        """Whether the answer only judges, and is never learned from."""
        return zlib.crc32(json.dumps(self.tokens).encode()) % HELD_OUT == 0


class Reservoir:
    """A bounded set of answers, for one thread. Answers that shall be forgotten, see `forget`, are dropped.

    It keeps ``rows`` answers, the last ``row_tokens`` tokens of each with its prompt, for ``max_age_s`` seconds.

    With ``on_disk`` it begins with the answers that were saved in ``folder``; else these are removed. ``key`` is a Fernet key
    that encrypts the file. Raises `ConfigError` if the file cannot be read, or not with this key.
    """

    def __init__(
        self,
        folder: Path,
        key: str | None = None,
        *,
        rows: int = 10**9,
        row_tokens: int = 10**9,
        max_age_s: float = math.inf,
        on_disk: bool = True,
    ) -> None:
        self._rows, self._row_tokens, self._max_age_s = rows, row_tokens, max_age_s
        self._folder, self._on_disk = folder, on_disk
        self._seal = None if key is None else _fernet(key)
        self._newest: deque[Sample] = deque()
        self._older: list[tuple[float, int, Sample]] = []  # a heap: the smallest weight first, of equal ones the oldest
        self.num_added = 0  # answers that were ever added
        self._rng = random.Random(0)
        left = [path for path in (folder / SEALED, folder / ROWS) if path.exists()]
        if left and on_disk:
            self.add(self._read(left[0]))
            self.save()  # without answers that were to be forgotten meanwhile
        elif not on_disk:
            for path in left:
                path.unlink()

    def __len__(self) -> int:
        return len(self._newest) + len(self._older)

    @property
    def newest(self) -> list[Sample]:
        self._expire()
        return list(self._newest)

    @property
    def older(self) -> list[Sample]:
        self._expire()
        return [sample for _, _, sample in self._older]

    def add(self, samples: Iterable[Sample]) -> None:
        """Add answers, and drop those beyond the limits, older ones before the newest."""
        forgotten = _forgotten(self._folder)
        for sample in samples:
            if sample.time <= forgotten.get(sample.tenant, 0.0):
                continue
            self.num_added += 1
            self._newest.append(sample.tail(self._row_tokens))
            if len(self._newest) > -(-self._rows // 2):
                old = self._newest.popleft()
                weight = self._rng.random() ** (1 / (1 + old.corrected))
                heapq.heappush(self._older, (weight, self.num_added, old))
            if len(self._older) > self._rows // 2:
                heapq.heappop(self._older)
        self._expire()

    def forget(self) -> bool:
        """Drop answers that shall be forgotten, see `forget`, here and on disk; returns whether there were any."""
        forgotten, before = _forgotten(self._folder), len(self)
        self._keep(lambda sample: sample.time > forgotten.get(sample.tenant, 0.0))
        if changed := len(self) < before:
            self.save()
        return changed

    def save(self) -> None:
        """Write all answers to the folder, atomically; does nothing unless they are kept on disk."""
        if not self._on_disk:
            return
        rows = [*self.older, *self._newest]
        content = gzip.compress("".join(json.dumps(asdict(row)) + "\n" for row in rows).encode())
        name = ROWS if self._seal is None else SEALED
        with replacing(self._folder / name, 0o600) as file:
            file.write(content if self._seal is None else self._seal.encrypt(content))
        if self._seal is not None:
            (self._folder / ROWS).unlink(missing_ok=True)

    def _read(self, path: Path) -> list[Sample]:
        sealed = path.name == SEALED
        if sealed and self._seal is None:
            raise ConfigError(f"{path} is encrypted: give its key, or remove it")
        try:
            content = path.read_bytes()
            content = self._seal.decrypt(content) if sealed and self._seal is not None else content
            rows = [json.loads(line) for line in gzip.decompress(content).decode().splitlines()]
            return [Sample(**row | {"tokens": tuple(row["tokens"])}) for row in rows]
        except Exception as error:  # a disk error, a damaged file, or a wrong key
            remedy = "give the key it was written with, or remove it" if sealed else "remove it"
            raise ConfigError(f"{path} cannot be read ({reason(error)}): {remedy}") from None

    def _expire(self) -> None:
        oldest = time.time() - self._max_age_s
        self._keep(lambda sample: sample.time >= oldest)

    def _keep(self, wanted: Callable[[Sample], bool]) -> None:
        self._newest = deque(sample for sample in self._newest if wanted(sample))
        self._older = [entry for entry in self._older if wanted(entry[2])]
        heapq.heapify(self._older)


def forget(folder: Path, tenant: str) -> None:
    """Mark all answers of ``tenant`` up to now as to be forgotten; a learner that runs on ``folder`` drops them in seconds."""
    with (folder / FORGOTTEN).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"tenant": tenant, "time": time.time()}) + "\n")


def _forgotten(folder: Path) -> dict[str, float]:
    """The time up to which answers shall be forgotten, by tenant."""
    path = folder / FORGOTTEN
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    times: dict[str, float] = {}
    for request in map(json.loads, lines):
        times[request["tenant"]] = max(times.get(request["tenant"], 0.0), float(request["time"]))
    return times


def _fernet(key: str) -> Any:
    try:
        from cryptography.fernet import Fernet
    except ImportError:
        raise ConfigError("Encrypted answers need the package cryptography: pip install '.[align]'") from None
    try:
        return Fernet(key)
    except ValueError as error:
        raise ConfigError(f"The key for answers is not a Fernet key ({error}): make one with Fernet.generate_key()") from None
