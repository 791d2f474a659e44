"""Folders that are made once and kept below the user's cache: models in another form, tokenizers as others read them."""

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
    """Where folders are kept: ``$CASCADE_CACHE``, else ``cascade`` in the user's cache."""
    given = os.environ.get(CACHE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(given) if given else Path(cache) / "cascade").expanduser()


def kept(place: Path, make: Callable[[Path], None], *, states: Path | None = None) -> Path:
    """The folder ``place``, after ``make`` has filled it, here or in another process; raises `ModelError` if it cannot be.

    It is filled beside its place and then renamed, so a process that is killed leaves no half folder that looks whole. A
    folder of ``states`` has one for each state that a source was in: all but that of ``place`` are removed.
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
    """Wait until no other process fills a folder there: two that convert a model would take twice the memory."""
    with (folder / "lock").open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: the last one to rename finds the folder there
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
