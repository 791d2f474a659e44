"""LoRA adapters that lie in one folder, or in a bucket, each in a folder of its own name."""

import contextlib
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from cascade.errors import ConfigError, InvalidRequest, reason

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")  # cannot lead out of the folder
CONFIG = "adapter_config.json"  # every adapter has one
REMEDY = "mount it, and name the folder"


class AdapterFolder:
    """What is at ``path``, a folder or an address such as ``s3://bucket/folder``; a bucket is read with pyarrow.

    An adapter of a bucket is copied once: a new version needs a new name.
    """

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` if it cannot be read."""
        self._path = path
        self._bucket: Any = None
        if "://" in path:
            try:
                from pyarrow import fs

                self._fs: Any = fs
                self._bucket, self._root = fs.FileSystem.from_uri(path)
            except ImportError:
                raise ConfigError(
                    f"lora_path is {path!r}: `pip install 'cascade-serve[buckets]'`, which reads buckets; or {REMEDY}"
                ) from None
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"lora_path is {path!r}, which pyarrow cannot open: {reason(error)}; mend it, or {REMEDY}"
                ) from None
            self._copies = Path(tempfile.mkdtemp(prefix="cascade-adapters-"))
            weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)
        elif not Path(path).is_dir():
            raise ConfigError(f"lora_path is {path!r}, which is no folder here: name one that routers and full replicas see")

    def names(self) -> list[str]:
        """Names of all adapters that are there now. Waits for the bucket; empty if it does not answer."""
        if self._bucket is None:
            return sorted(one.parent.name for one in Path(self._path).glob(f"*/{CONFIG}") if NAME.fullmatch(one.parent.name))
        try:
            found = self._bucket.get_file_info(self._fs.FileSelector(self._root, recursive=True))
        except OSError:
            return []
        return sorted(Path(one.path).parent.name for one in found if one.base_name == CONFIG)

    def has(self, name: str) -> bool:
        """Whether an adapter is there. Waits for the bucket."""
        if not NAME.fullmatch(name):
            return False
        if self._bucket is None:
            return (Path(self._path) / name / CONFIG).is_file()
        with contextlib.suppress(OSError):
            return bool(self._bucket.get_file_info(f"{self._root}/{name}/{CONFIG}").is_file)
        return False

    def fetch(self, name: str) -> None:
        """Copy an adapter of a bucket to this machine, if it is there and was not copied before. Waits for the bucket."""
        if self._bucket is None or (place := self._copies / name).exists() or not self.has(name):
            return
        with tempfile.TemporaryDirectory(dir=self._copies) as coming, contextlib.suppress(OSError):
            to = Path(coming) / name
            to.mkdir()
            self._fs.copy_files(f"{self._root}/{name}", str(to), self._bucket, self._fs.LocalFileSystem())
            os.replace(to, place)  # fails where another one was faster

    def place(self, name: str) -> str:
        """The adapter's folder on this machine; raises `InvalidRequest` if it is not there, or was not fetched."""
        place = (Path(self._path) if self._bucket is None else self._copies) / name
        if not NAME.fullmatch(name) or not (place / CONFIG).is_file():
            raise InvalidRequest(f"adapter is {name[:200]!r}: {self._path} has none of this name that can be read")
        return str(place)
