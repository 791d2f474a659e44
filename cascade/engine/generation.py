"""Generation settings in a model's own files: tokens that end a text, and default sampling parameters.

Imports neither PyTorch nor Transformers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cascade.engine.gguf import described
from cascade.errors import InvalidRequest, ModelError, model_errors, reason
from cascade.params import SamplingParams

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
AUTO, NONE = "auto", "vllm"  # values of `generation_config` besides folders: the model's own file, and no file
# fields of a generation config that become defaults, and their names here; the same as in vLLM
SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
SAMPLING["max_new_tokens"] = "max_tokens"


def sampling_defaults(source: str, choice: str = AUTO, *, revision: str | None = None) -> dict[str, Any]:
    """Default arguments of `SamplingParams` from the generation config of a model.

    ``choice`` is "auto" for the model's own file, "vllm" for none, or a folder that holds one. Raises `ModelError` if the
    file is broken or a value is none that a request may have.
    """
    if choice == NONE:
        return {}
    if choice != AUTO and not Path(choice, GENERATION_CONFIG).is_file():
        raise ModelError(f"generation_config is {choice!r}: it must be 'auto', 'vllm', or a folder with {GENERATION_CONFIG}")
    origin = source if choice == AUTO else choice
    values = read_json(origin, GENERATION_CONFIG, revision if choice == AUTO else None)
    defaults = {ours: values[theirs] for theirs, ours in SAMPLING.items() if values.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise ModelError(f"{GENERATION_CONFIG} of {origin!r}: {error}; fix it, or set generation_config to 'vllm'") from None
    return defaults


def configured_ends(source: str, *, revision: str | None = None) -> frozenset[int]:
    """End tokens in the config and in the generation config of a model, together; raises `ModelError` if one is broken."""
    return frozenset(
        token for name in (CONFIG, GENERATION_CONFIG) for token in _ends(source, name, read_json(source, name, revision))
    )


def _ends(source: str, name: str, values: Mapping[str, Any]) -> Iterator[int]:
    """The end tokens in a file, also those in its section on text."""
    for part in (values, values.get("text_config")):
        given = part.get("eos_token_id") if isinstance(part, Mapping) else None
        for token in given if isinstance(given, list) else [] if given is None else [given]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ModelError(
                    f"{name} of {source!r} has the eos_token_id {token!r}: it must be a token id or a list of them"
                )
            if token >= 0:  # some files have -1 for none
                yield token


def read_json(source: str, name: str, revision: str | None = None) -> dict[str, Any]:
    """The JSON object in a file of a model; empty if there is no such file. Raises `ModelError`."""
    folder = described(source)
    with model_errors(f"{name} of {source!r} cannot be read"):
        path = Path(folder, name) if Path(folder).is_dir() else _downloaded(folder, name, revision)
        if path is None or not path.exists():
            return {}
        content = path.read_bytes()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} of {source!r} is not JSON ({reason(error)}): fix it or download it again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{name} of {source!r} must hold a JSON object: fix it or download it again")
    return values


def _downloaded(source: str, name: str, revision: str | None) -> Path | None:
    """The path of a file on the hub, from its cache if it is there; ``None`` if there is no such file."""
    # imported late, since it takes half a second
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except EntryNotFoundError as error:
        known = constants.HF_HUB_OFFLINE or try_to_load_from_cache(source, name, revision=revision) is not None
        if isinstance(error, LocalEntryNotFoundError) and not known:
            raise  # the hub was not reached, and may have it
        return None
