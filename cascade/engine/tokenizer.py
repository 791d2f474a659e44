"""Text to token ids and back, piece by piece; fingerprints for comparing vocabularies of tiers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from cascade.engine.chat_template import render
from cascade.engine.generation import configured_ends
from cascade.engine.gguf import described
from cascade.engine.published_tokenizer import ChatTemplates, published
from cascade.errors import InvalidRequest, ModelError
from cascade.params import LONE_SURROGATE, is_text

CONNECT_S = 5.0  # timeout for the hub
PRIMING_TOKENS = 8  # last tokens of the prompt that a decoder reads first, so that leading spaces are right
HALF = "\ufffd"  # decoded from the bytes of an unfinished character
PROBE_ANSWER = "probe_answer"  # an assistant's text, after which the template writes the end of the turn


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


def check_source(source: str) -> None:
    """Raise `ModelError` unless ``source`` is a folder or a hub id, and the hub can be reached if needed."""
    if Path(source).is_file():
        raise ModelError(f"{source!r} is a file: give the folder that holds the model")
    if (source.startswith(("/", ".", "~")) or source.count("/") > 1) and not is_local(source):
        raise ModelError(f"There is no folder {source!r}: give the path of a model's folder, or a hub id")
    cached = Path(constants.HF_HUB_CACHE, f"models--{source.replace('/', '--')}").is_dir()
    if not (is_local(source) or cached or constants.HF_HUB_OFFLINE or _hub_answers()):
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


def is_local(source: str) -> bool:
    """Whether ``source`` is a folder on this machine rather than a model on the hub."""
    return Path(source).is_dir()
