"""Text to token ids and back, piece by piece; fingerprints, which tell whether tiers have the same vocabulary."""

import hashlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cascade.engine.generation import configured_ends
from cascade.engine.gguf import described
from cascade.errors import ModelError, reason

CONNECT_S = 5.0  # to the hub
PRIMING_TOKENS = 8  # of the prompt that a decoder sees first, so that leading spaces come out right
PROBE_ANSWER = "probe_answer"  # of an assistant, behind which a chat template writes the end of its turn


class Tokenizer:
    """The tokenizer that a model was published with."""

    def __init__(self, backend: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> None:
        self.backend = backend
        self.end_ids = end_ids  # tokens that end a text

    @classmethod
    def from_pretrained(cls, source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> "Tokenizer":
        """Load from a local path or the Hugging Face hub; raises `ModelError`."""
        folder = described(source)
        check_source(folder)
        try:
            backend = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"No tokenizer can be loaded from {source!r}: {reason(error)}") from error
        if not backend.is_fast:
            raise ModelError(f"{source!r} has no tokenizer.json; convert its tokenizer to the fast format")
        return cls(backend, _end_ids(source, revision, backend))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around it."""
        return self.backend.encode(text)

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a text that is no prompt, however long: no special tokens around it, and no warning."""
        return self.backend.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        text = self.backend.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def decoder(self, prompt: Sequence[int]) -> "Decoder":
        return Decoder(self.backend.backend_tokenizer, prompt)

    def begins(self, ids: Sequence[int]) -> list[int]:
        """How many characters of the text are complete before each of ``ids``."""
        decoder, begin, begins = self.decoder(()), 0, []
        for token in ids:
            begins.append(begin)
            begin += len(decoder.step(token))
        return begins

    @property
    def num_ids(self) -> int:
        """Ids that stand for something; models may have more, for padding."""
        return len(self.backend)

    @property
    def fingerprint(self) -> str:
        """Hash of vocabulary and special tokens: equal iff the same ids mean the same text."""
        special = {name: str(token) for name, token in self.backend.special_tokens_map.items() if isinstance(token, str)}
        special.pop("pad_token", None)  # padding is not part of any text
        content = json.dumps([sorted(self.backend.get_vocab().items()), special], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


class Decoder:
    """Incremental detokenization: text comes out as soon as it is certain, never half a character."""

    def __init__(self, backend: FastTokenizer, prompt: Sequence[int]) -> None:
        self._backend = backend
        self._prefix = list(prompt[-PRIMING_TOKENS:])
        self._stream = DecodeStream(ids=self._prefix, skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_chars = 0

    def step(self, token: int) -> str:
        """The text that ``token`` completes, "" while a character is unfinished."""
        self._ids.append(token)
        text: str = self._stream.step(self._backend, token) or ""
        self._num_chars += len(text)
        return text

    def flush(self) -> str:
        """The rest at the end of the text: an unfinished character becomes U+FFFD."""
        whole: str = self._backend.decode([*self._prefix, *self._ids], skip_special_tokens=True)
        begin = len(self._backend.decode(self._prefix, skip_special_tokens=True))
        return whole[begin + self._num_chars :]


def _end_ids(source: str, revision: str | None, backend: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a text, whoever names them: the two configs, the tokenizer, and the chat template.

    Any one of them may lack what the others know: a base model's configs name the end of a document, its tokenizer or its
    template the end of a turn, without which an answer would run on into turns of the user.
    """
    named = {backend.eos_token_id, _end_of_turn(backend)} - {None}
    return configured_ends(source, revision=revision) | frozenset(named)


def _end_of_turn(backend: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes behind what the assistant says; ``None`` if it writes none."""
    said = [{"role": "user", "content": "probe_question"}, {"role": "assistant", "content": PROBE_ANSWER}]
    try:
        text = str(backend.apply_chat_template(said, tokenize=False))
    except Exception:  # there is no template, or it wants other conversations; templates are programs
        return None
    _, answer, after = text.rpartition(PROBE_ANSWER)
    following = backend.encode(after.lstrip(), add_special_tokens=False)[:1] if answer else []
    added = backend.added_tokens_decoder
    return next((token for token in following if token in added and added[token].special), None)


def check_source(source: str) -> None:
    """Raise `ModelError` unless ``source`` is a folder or a hub id, and the hub can be reached if it is needed."""
    if Path(source).is_file():
        raise ModelError(f"{source!r} is a file: give the folder that holds the model")
    if (source.startswith(("/", ".", "~")) or source.count("/") > 1) and not is_local(source):
        raise ModelError(f"There is no folder {source!r}: give the path of a model's folder, or a hub id")
    cached = Path(constants.HF_HUB_CACHE, f"models--{source.replace('/', '--')}").is_dir()
    if not (is_local(source) or cached or constants.HF_HUB_OFFLINE or _hub_answers()):
        raise ModelError(
            f"{source!r} is no folder here, nothing of it is in the cache, and the hub ({constants.ENDPOINT}) cannot be "
            "reached: mend its spelling, or connect this machine"
        )


def _hub_answers() -> bool:
    """Whether a connection to the hub can be made; its library would try for half a minute. Proxies are not tried."""
    hub, proxies = urlsplit(constants.ENDPOINT), getproxies()
    if proxies.get(hub.scheme) or proxies.get("all"):
        return True
    try:
        socket.create_connection((hub.hostname or "", hub.port or (443 if hub.scheme == "https" else 80)), CONNECT_S).close()
    except OSError:
        return False
    return True


def is_local(source: str) -> bool:
    """Whether ``source`` names a folder on this machine rather than a model on the hub."""
    return Path(source).is_dir()
