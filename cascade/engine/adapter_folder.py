"""LoRA adapters that lie in one folder, each in a folder of its own name."""

import re
from pathlib import Path

from cascade.errors import ConfigError, InvalidRequest

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")  # cannot lead out of the folder
CONFIG = "adapter_config.json"  # every adapter has one


class AdapterFolder:
    """What is in the folder ``path`` by now."""

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` if it cannot be read."""
        self._path = Path(path)
        if not self._path.is_dir():
            raise ConfigError(
                f"lora_path is {path!r}, which is no folder here: name one that routers and full replicas see; mount a bucket"
            )

    def names(self) -> list[str]:
        """Names of all adapters that are there."""
        return sorted(file.parent.name for file in self._path.glob(f"*/{CONFIG}") if NAME.fullmatch(file.parent.name))

    def has(self, name: str) -> bool:
        """Whether an adapter is there."""
        return bool(NAME.fullmatch(name)) and (self._path / name / CONFIG).is_file()

    def place(self, name: str) -> str:
        """The adapter's folder; raises `InvalidRequest` if it is not there."""
        if not self.has(name):
            raise InvalidRequest(f"adapter is {name[:200]!r}: {self._path} has none of this name that can be read")
        return str(self._path / name)
