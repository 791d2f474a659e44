"""Folders that are made once and kept below the user's cache, such as converted models and tokenizers."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cascade.errors import ModelError

CACHE = "CASCADE_CACHE"
PARTIAL = "partial-"


def cache_folder() -> Path:
    """The parent of kept folders: ``$CASCADE_CACHE``, else ``cascade`` in the user's cache."""
    given = os.environ.get(CACHE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(given) if given else Path(cache) / "cascade").expanduser()


def kept(place: Path, make: Callable[[Path], None], *, states: Path | None = None) -> Path:
    """The folder ``place``, filled by ``make`` here or earlier; raises `ModelError` if it cannot be written.

    It is filled elsewhere and then renamed, so a killed process leaves no half folder that looks complete. ``states`` is a
    folder with one subfolder for each state of a source: all but the one with ``place`` are removed.
    """
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(states or place.parent):
            if not place.is_dir():
                old = (other for other in states.iterdir() if other not in (place, place.parent)) if states else ()
                for folder in (*(other for other in old if other.is_dir()), *place.parent.glob(f"{PARTIAL}*")):
                    shutil.rmtree(folder, ignore_errors=True)
                unfinished = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=place.parent))
                try:
                    make(unfinished)
                    with contextlib.suppress(FileExistsError):
                        unfinished.rename(place)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        given = os.environ.get(CACHE)
        where = f"{CACHE} is {given!r}, which" if given else f"The cache folder {str(cache_folder())!r}"
        mend = "name another folder" if given else f"set {CACHE} to another folder"
        raise ModelError(f"{where} cannot be written ({error.strerror or error}): {mend}") from error
    return place


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process fills the folder: two conversions at once would take twice the memory."""
    with (folder / "lock").open("w") as file:
        with contextlib.suppress(OSError):  # no locks here: the last process to rename finds the folder complete
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
