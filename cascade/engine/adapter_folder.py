"""LoRA adapters that lie in one folder, each in a folder of its own name."""

import re
import shutil
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from tempfile import mkdtemp

from cascade.errors import ConfigError, InvalidRequest, reason

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")  # cannot lead out of the folder
CONFIG = "adapter_config.json"  # every adapter has one
MAX_COPIES = 64  # the most recently used ones


class AdapterFolder:
    """The present adapters in the folder ``path``, which may be a mounted bucket, and copies on a disk of this machine.

    Safe to use from several threads.
    """

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` if the folder cannot be read."""
        self._path = Path(path)
        if not self._path.is_dir():
            raise ConfigError(
                f"lora_path is {path!r}, which is no folder here: name one that routers and full replicas see; mount a bucket"
            )
        self._copies: OrderedDict[str, str] = OrderedDict()  # paths by name; deleted with this object
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return sorted(file.parent.name for file in self._path.glob(f"*/{CONFIG}") if NAME.fullmatch(file.parent.name))

    def has(self, name: str) -> bool:
        return bool(NAME.fullmatch(name)) and (self._path / name / CONFIG).is_file()

    def place(self, name: str) -> str:
        """The path of a copy of the adapter, made if needed; raises `InvalidRequest` if the adapter cannot be read.

        Copying may take long if the folder is slow, so do not call this in a thread that others wait for.
        """
        with self._lock:
            if name in self._copies:
                self._copies.move_to_end(name)
                return self._copies[name]
        if not self.has(name):
            raise InvalidRequest(f"adapter is {name[:200]!r}: {self._path} has none of this name that can be read")
        copy = mkdtemp(prefix="cascade-adapter-")
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        try:
            shutil.copytree(self._path / name, copy, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise InvalidRequest(f"adapter is {name!r}, which cannot be read from {self._path}: {reason(error)}") from error
        with self._lock:
            copy = self._copies.setdefault(name, copy)  # another thread may have been faster
            if len(self._copies) > MAX_COPIES:
                shutil.rmtree(self._copies.popitem(last=False)[1], ignore_errors=True)
        return copy
