"""Numbered weights of one drafter in a folder, and a file that says which of them serve.

FOLDER/000001/  FOLDER/000002/  ...     whole, or not there
FOLDER/current                          a number; empty or missing for the weights that the drafter began with
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

CURRENT = "current"
PARTIAL = "partial"
KEPT = 4  # versions, the newest ones and that which serves


class Versions:
    """Versions in ``folder``. A crash at any moment leaves a whole old or a whole new one to serve."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def all(self) -> list[Path]:
        """Whole versions, the oldest first."""
        return sorted(path for path in self._folder.glob("[0-9]*") if path.is_dir()) if self._folder.is_dir() else []

    @property
    def current(self) -> Path | None:
        """Of the weights that are to serve; ``None`` for those that it began with."""
        pointer = self._folder / CURRENT
        name = pointer.read_text(encoding="utf-8").strip() if pointer.exists() else ""
        return self._folder / name if name and (self._folder / name).is_dir() else None

    def add(self, write: Callable[[Path], None]) -> Path:
        """A new version, of the files that ``write`` puts into a folder; it does not serve yet."""
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # of a learner that was killed
        partial.mkdir()
        write(partial)
        for file in partial.iterdir():
            _to_disk(file)
        place = self._folder / f"{1 + max((int(path.name) for path in self.all), default=0):06d}"
        os.rename(partial, place)
        return place

    def choose(self, version: Path | None) -> None:
        """Let ``version`` serve from now on. Old ones are removed, but for some to go back to."""
        partial = self._folder / f"{CURRENT}.partial"
        partial.write_text("" if version is None else version.name, encoding="utf-8")
        _to_disk(partial)
        os.replace(partial, self._folder / CURRENT)
        for old in self.all[:-KEPT]:
            if old != version:
                shutil.rmtree(old, ignore_errors=True)

    def rollback(self) -> Path | None:
        """Go back to the version before the current one, and return it; ``None`` if that is what the drafter began with."""
        current = self.current
        before = [path for path in self.all if current is not None and path.name < current.name]
        chosen = before[-1] if before else None
        self.choose(chosen)
        return chosen


def _to_disk(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
