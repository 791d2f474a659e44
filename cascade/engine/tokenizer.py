"""Text to token ids and back, piece by piece; fingerprints for comparing vocabularies of tiers.

Files of tokenizers have many formats, and the class that reads them depends on the model, so only Transformers can read them.
So that other processes need not import it, the result is kept below `cascade.engine.kept.cache_folder`: the tokenizer in the
format of `tokenizers`, the names of its special tokens, and its chat template. The path depends on the source, the content of
its files, and the versions of the libraries.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from huggingface_hub import constants, get_session, hf_hub_download
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from cascade.engine.chat_template import render
from cascade.engine.generation import configured_ends
from cascade.engine.gguf import described
from cascade.engine.kept import cache_folder, kept
from cascade.errors import InvalidRequest, ModelError, model_errors
from cascade.params import LONE_SURROGATE, is_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatTemplates: TypeAlias = str | dict[str, str]  # one for all conversations, or by name

CONNECT_S = 5.0  # timeout for the hub
PRIMING_TOKENS = 8  # last tokens of the prompt that a decoder reads first, so that leading spaces are right
HALF = "\ufffd"  # decoded from the bytes of an unfinished character
PROBE_ANSWER = "probe_answer"  # an assistant's text, after which the template writes the end of the turn
FORM = 1  # version of the kept format
BACKEND, FACTS = "tokenizer.json", "facts.json"
NAMED = ("tokenizer_config.json", "config.json")  # every model has one of these
SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"}  # files that may belong to a tokenizer
TEMPLATES = "additional_chat_templates"  # folder of chat templates

log = logging.getLogger(__name__)


@dataclass
class Tokenizer:
    """The tokenizer of a published model. Needs Transformers only the first time on a machine."""

    backend: FastTokenizer
    end_ids: frozenset[int]  # tokens that end a text
    special_tokens: Mapping[str, str]  # by their names in templates, such as bos_token
    chat_template: ChatTemplates | None
    source: str  # folder or hub id

    @classmethod
    def from_pretrained(cls, source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> "Tokenizer":
        """Load from a local path or the Hugging Face hub; raises `ModelError`."""
        folder = described(source)
        check_source(folder)
        backend, facts = published(folder, revision=revision, trust_remote_code=trust_remote_code)
        tokenizer = cls(backend, frozenset(), facts.special_tokens, facts.chat_template, folder)
        tokenizer.end_ids = configured_ends(source, revision=revision) | _own_ends(tokenizer)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around it."""
        return self._ids(text, add_special_tokens=True)

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a text without special tokens around it."""
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not is_text(text):
            raise InvalidRequest(f"The text cannot be encoded: {LONE_SURROGATE}")
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)  # releases the GIL
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, by default without special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decoder(self, prompt: Sequence[int]) -> "Decoder":
        return Decoder(self.backend, prompt)

    def begins(self, ids: Sequence[int]) -> list[int]:
        """How many characters of the text are complete before each of ``ids``."""
        decoder, begin, begins = self.decoder(()), 0, []
        for token in ids:
            begins.append(begin)
            begin += len(decoder.step(token))
        return begins

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt of a conversation by the model's chat template; ``options`` are those of `chat_template.render`.

        Raises any error of the template, and `ValueError` if there is no template.
        """
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if tools is not None and "tool_use" in template else "default")
        if template is None:
            raise ValueError("the model has no chat template, or several without one named default")
        return render(template, messages, tools, **{**self.special_tokens, **options})

    @cached_property
    def added_tokens(self) -> dict[int, AddedToken]:
        """Added tokens, which merging never makes, by their ids; special tokens are among them."""
        return dict(self.backend.get_added_tokens_decoder())

    @property
    def num_ids(self) -> int:
        """Number of ids with a meaning; models may have more, for padding."""
        return int(self.backend.get_vocab_size())

    @property
    def fingerprint(self) -> str:
        """Hash of vocabulary and special tokens, equal iff the same ids mean the same text."""
        special = dict(self.special_tokens)
        special.pop("pad_token", None)  # padding is not part of any text
        content = json.dumps([sorted(self.backend.get_vocab().items()), special], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


class Decoder:
    """Incremental detokenization: gives text as soon as it is certain, and never half a character.

    A token is decoded behind those of the piece before it, since many decoders write the first token of a text otherwise.
    """

    def __init__(self, backend: FastTokenizer, prompt: Sequence[int]) -> None:
        self._backend = backend
        self._ids = list(prompt[-PRIMING_TOKENS:])  # token ids of the last piece, and later ones
        self._num_old = len(self._ids)
        self._old = self._text()  # text of the last piece

    def step(self, token: int) -> str:
        """The text that ``token`` completes, "" while a character is unfinished."""
        self._ids.append(token)
        return "" if (text := self._text()).endswith(HALF) else self._after(text)

    def flush(self) -> str:
        """The rest at the end of the text: an unfinished character becomes U+FFFD."""
        return self._after(self._text())

    def _text(self) -> str:
        return str(self._backend.decode(self._ids, skip_special_tokens=True))

    def _after(self, text: str) -> str:
        """The part of ``text`` after the last piece; a prompt may have ended in the middle of a character."""
        old = self._old if text.startswith(self._old) else self._old.rstrip(HALF)
        if len(text) <= len(old):
            return ""
        self._ids = self._ids[self._num_old :]
        self._num_old, self._old = len(self._ids), self._text()
        return text[len(old) :]


def _own_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """End tokens of the tokenizer and its chat template.

    A config may lack some: a base model's config has the end of a document, but only its tokenizer or its template have the end
    of a turn, without which an answer would continue with invented turns of the user.
    """
    end = tokenizer.special_tokens.get("eos_token")
    named = {None if end is None else tokenizer.backend.token_to_id(end), _end_of_turn(tokenizer)}
    return frozenset(token for token in named if token is not None)


def _end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template writes after the assistant's text; ``None`` if it writes none."""
    messages = [{"role": "user", "content": "probe_question"}, {"role": "assistant", "content": PROBE_ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages)
    except Exception:  # there is no template, or it refuses this conversation
        return None
    _, answer, after = text.rpartition(PROBE_ANSWER)
    following = tokenizer.encode_part(after.lstrip())[:1] if answer else []
    added = tokenizer.added_tokens
    return next((token for token in following if token in added and added[token].special), None)


# files


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
        facts = Facts(**json.loads((place / FACTS).read_text(encoding="utf-8")))
        backend = FastTokenizer.from_file(str(place / BACKEND))
    else:
        tokenizer = pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        facts = Facts(dict(tokenizer.special_tokens_map), tokenizer.chat_template, tokenizer.split_special_tokens)
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        if (place := place or _place(source, revision, trust_remote_code)) is not None:  # now the files are on this machine
            try:
                kept(place, partial(_write, backend, facts), states=place.parent)
            except Exception as error:  # a disk error, or a tokenizer with parts in Python
                log.warning("A tokenizer cannot be kept in %s, so every start makes it anew: %s", place, error)
    backend.encode_special_tokens = facts.splits_special_tokens
    return backend, facts


def pretrained(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Transformers' own tokenizer of a folder, a GGUF file or a hub id, which can be changed and saved; raises `ModelError`."""
    from transformers import AutoTokenizer

    folder = described(source)
    with model_errors(f"No tokenizer can be loaded from {source!r}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
    if not tokenizer.is_fast:
        raise ModelError(f"{source!r} has no tokenizer.json; convert its tokenizer to the fast format")
    return tokenizer


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


def check_source(source: str) -> None:
    """Raise `ModelError` unless ``source`` is a folder or a hub id, and the hub can be reached if needed."""
    local = Path(source).is_dir()
    if Path(source).is_file():
        raise ModelError(f"{source!r} is a file: give the folder that holds the model")
    if (source.startswith(("/", ".", "~")) or source.count("/") > 1) and not local:
        raise ModelError(f"There is no folder {source!r}: give the path of a model's folder, or a hub id")
    cached = Path(constants.HF_HUB_CACHE, f"models--{source.replace('/', '--')}").is_dir()
    if not (local or cached or constants.HF_HUB_OFFLINE or _hub_answers()):
        raise ModelError(
            f"{source!r} is no folder here, nothing of it is in the cache, and the hub ({constants.ENDPOINT}) cannot be "
            "reached: correct its spelling, or connect this machine"
        )


def _hub_answers() -> bool:
    """Whether the hub answers at all; its own library would try for half a minute."""
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_S)
    except Exception:  # network, proxy or a wrong address
        return False
    return True
