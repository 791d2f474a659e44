"""Bytes and names of all tokens of a vocabulary, for lists of log-probabilities."""

from llguidance import LLTokenizer

from cascade.engine.tokenizer import Tokenizer


class Spelling:
    """Bytes and names of all tokens; building it takes up to a second with large vocabularies.

    The joined bytes of a text's tokens are the text; special tokens, which decoding leaves out, have none. The name of a token
    is the text that it spells, or `bytes:\\xf0\\x9f` for a part of a character. If several tokens spell the same text, the last
    one has it as its name, and the others are `token_id:5`. So names are unique.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = _spelled(tokenizer)
        owners: dict[str, int] = {}
        for id, spelled in enumerate(self._bytes):
            try:
                owners[spelled.decode()] = id
            except UnicodeDecodeError:
                owners["bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)] = id
        for id, token in tokenizer.added_tokens.items():
            if token.special:
                owners[token.content] = id
                self._bytes[id] = b""
        self._names = {id: name for name, id in owners.items()}

    def name(self, token: int) -> str:
        """The unique name of a token."""
        return self._names.get(token) or f"token_id:{token}"

    def bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text."""
        return self._bytes[token] if token < len(self._bytes) else b""


def _spelled(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token; if llguidance does not support the tokenizer, the bytes of the decoded token."""
    ids = range(tokenizer.num_ids)
    try:
        vocabulary = LLTokenizer(tokenizer.backend.to_str(), eos_token=sorted(tokenizer.end_ids) or None)
    except Exception:  # llguidance may raise anything
        return [tokenizer.decode([id]).encode() for id in ids]
    spelled = [vocabulary.decode_bytes([id]) for id in ids]
    for id, token in tokenizer.added_tokens.items():
        if id < len(spelled):
            spelled[id] = token.content.encode()
    return spelled
