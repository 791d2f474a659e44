"""Numbered weights of one drafter in a folder, and a file that names the version to serve.

FOLDER/000001/  FOLDER/000002/  ...     complete, or absent
FOLDER/current                          a number; empty or missing for the drafter's original weights
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CURRENT = "current"
PARTIAL = "partial"
KEPT = 4  # newest versions that are kept, besides the one that serves


class Versions:
    """Versions in ``folder``. After a crash at any moment there is a complete version to serve, the old or the new one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def all(self) -> list[Path]:
        """Complete versions, the oldest first."""
        return sorted(path for path in self.folder.glob("[0-9]*") if path.is_dir()) if self.folder.is_dir() else []

    @property
    def current(self) -> Path | None:
        """The version to serve; ``None`` for the original weights."""
        pointer = self.folder / CURRENT
        name = pointer.read_text(encoding="utf-8").strip() if pointer.exists() else ""
        return self.folder / name if name and (self.folder / name).is_dir() else None

    def add(self, write: Callable[[Path], None]) -> Path:
        """Add a version from the files that ``write`` puts into a folder; it does not serve until it is chosen."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # left by a learner that was killed
        partial.mkdir()
        write(partial)
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        place = self.folder / f"{1 + max((int(path.name) for path in self.all), default=0):06d}"
        os.rename(partial, place)
        return place

    def choose(self, version: Path | None) -> None:
        """Let ``version`` serve from now on, and remove old versions except the latest `KEPT`."""
        with replacing(self.folder / CURRENT) as file:
            file.write(b"" if version is None else version.name.encode())
        for old in self.all[:-KEPT]:
            if old != version:
                shutil.rmtree(old, ignore_errors=True)

    def rollback(self) -> Path | None:
        """Return to the version before the current one, and return its folder; ``None`` for the original weights."""
        current = self.current
        before = [path for path in self.all if current is not None and path.name < current.name]
        chosen = before[-1] if before else None
        self.choose(chosen)
        return chosen


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to, which replaces ``path`` at the end: if the process is killed before, ``path`` stays unchanged.

    Its permissions are ``mode`` without the process's umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
