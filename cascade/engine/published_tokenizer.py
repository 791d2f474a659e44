"""Tokenizers of published models, loaded by Transformers once, and kept so that other processes need not import it.

Files of tokenizers have many formats, and the class that reads them depends on the model, so only Transformers can read them.
The result is kept below `cascade.engine.kept.cache_folder`: the tokenizer in the format of `tokenizers`, the names of its
special tokens, and its chat template. The path depends on the source, the content of its files, and the versions of the
libraries.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer as FastTokenizer

from cascade.engine.gguf import described
from cascade.engine.kept import cache_folder, kept
from cascade.errors import ModelError, model_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatTemplates: TypeAlias = str | dict[str, str]  # one for all conversations, or by name

FORM = 1  # version of the kept format
BACKEND, FACTS = "tokenizer.json", "facts.json"
NAMED = ("tokenizer_config.json", "config.json")  # every model has one of these
SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"}  # files that may belong to a tokenizer

TEMPLATES = "additional_chat_templates"  # folder of chat templates

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a tokenizer besides its backend."""

    special_tokens: dict[str, str]  # by their names in templates, such as bos_token
    chat_template: ChatTemplates | None
    splits_special_tokens: bool  # whether names of special tokens in a text are plain text


def published(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[FastTokenizer, Facts]:
    """The tokenizer of a folder or hub id; raises `ModelError`. Imports Transformers only if the tokenizer was not kept."""
    place = _place(source, revision, trust_remote_code)
    if place is not None and place.is_dir():
        facts = json.loads((place / FACTS).read_text(encoding="utf-8"))
        backend = FastTokenizer.from_file(str(place / BACKEND))
        parts = backend, Facts(**facts)
    else:
        parts = _facts(pretrained(source, revision=revision, trust_remote_code=trust_remote_code))
        # now the files are on this machine
        place = place or _place(source, revision, trust_remote_code)
        if place is not None:
            try:
                kept(place, partial(_write, *parts), states=place.parent)
            except Exception as error:  # a disk error, or a tokenizer with parts in Python
                log.warning("A tokenizer cannot be kept in %s, so every start makes it anew: %s", place, error)
    parts[0].encode_special_tokens = parts[1].splits_special_tokens
    return parts


def pretrained(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Transformers' own tokenizer of a folder, a GGUF file or a hub id, which can be changed and saved; raises `ModelError`."""
    from transformers import AutoTokenizer

    folder = described(source)
    with model_errors(f"No tokenizer can be loaded from {source!r}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
    if not tokenizer.is_fast:
        raise ModelError(f"{source!r} has no tokenizer.json; convert its tokenizer to the fast format")
    return tokenizer


def _facts(tokenizer: "PreTrainedTokenizerBase") -> tuple[FastTokenizer, Facts]:
    backend: FastTokenizer = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend, Facts(dict(tokenizer.special_tokens_map), tokenizer.chat_template, tokenizer.split_special_tokens)


def _place(source: str, revision: str | None, trust_remote_code: bool) -> Path | None:
    """The path for keeping a tokenizer; ``None`` if the model's files are not on this machine."""
    state = hashlib.sha256()
    for part in _state(source, revision):
        state.update(hashlib.sha256(part).digest())
    if state.digest() == hashlib.sha256().digest():
        return None
    form = f"{FORM}-{version('transformers')}-{version('tokenizers')}-{trust_remote_code}"
    name = hashlib.sha256(os.fsencode(f"{source} {revision}")).hexdigest()[:16]
    return cache_folder() / "tokenizers" / name / f"{form}-{state.hexdigest()[:16]}"


def _state(source: str, revision: str | None) -> Iterator[bytes]:
    """Data that identify the state of a tokenizer: contents of a folder's files, or a commit on the hub."""
    folder = Path(source)
    if folder.is_dir():
        for file in sorted((*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*"))):
            if file.suffix in SUFFIXES and file.is_file():
                yield os.fsencode(file.name)
                yield file.read_bytes()
        return
    for name in NAMED:
        with contextlib.suppress(Exception):  # errors of network and hub: Transformers reports them
            yield Path(hf_hub_download(source, name, revision=revision)).parent.name.encode()
            return


def _write(backend: FastTokenizer, facts: Facts, folder: Path) -> None:
    backend.save(str(folder / BACKEND))
    (folder / FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")
