"""Checks that all nodes have the same versions of packages."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from cascade.errors import ConfigError

# packages on which texts or messages between nodes depend; Ray itself checks Ray and Python
PACKAGES = ("cascade-serve", "torch", "transformers", "tokenizers", "llguidance", "vllm")


def packages() -> dict[str, str]:
    """Versions of `PACKAGES` that are installed here, without build tags such as ``+cu130``."""
    installed = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name).partition("+")[0]
    return installed


def check_alike(expected: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a package's version differs from that where the application was built."""
    here = packages()
    for name in here.keys() & expected.keys():
        if here[name] != expected[name]:
            raise ConfigError(
                f"This node has {name} {here[name]}, and the application was built with {expected[name]}, of which texts may "
                "differ: install what cluster/constraints.txt names on every node, or set verify to false"
            )
