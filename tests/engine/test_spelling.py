"""Names and bytes of tokens, where tokens are data."""

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from cascade.engine.spelling import Spelling
from cascade.engine.tokenizer import Tokenizer
from tests import small

TEXT = "😀 😃 😄 Hello Hello, wörld"


def pieces() -> Tokenizer:
    """As of Llama 2: bytes for what is no piece, and a decoder that strips the leading space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = [("▁", "H"), ("▁H", "e"), ("▁He", "l"), ("▁Hel", "l"), ("▁Hell", "o"), ("H", "e"), ("He", "l"), ("Hel", "l")]
    for piece in ("▁", "H", "e", "l", "o", *map("".join, merges), "Hello", "w", "r", "d"):
        vocab.setdefault(piece, len(vocab))
    backend = FastTokenizer(models.BPE(vocab, [*merges, ("Hell", "o")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, frozenset([2]), {}, None, "pieces")


def unknown() -> Tokenizer:
    """Of a kind that llguidance does not know."""
    backend = FastTokenizer(models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend, frozenset(), {}, None, "words")


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_bytes_of_tokens_are_the_text(kind: str) -> None:
    """Guards `bytes` of parts of characters, which were those of U+FFFD, and leading spaces, which decoding strips."""
    tokenizer = pieces() if kind == "pieces" else Tokenizer.from_pretrained(small.paths()[-1])
    spelling, prompt = Spelling(tokenizer), tokenizer.encode("Hello")
    ids = tokenizer.encode(TEXT)
    decoder = tokenizer.decoder(prompt)
    text = "".join(decoder.step(id) for id in ids) + decoder.flush()
    assert b"".join(map(spelling.bytes, ids)).decode() == text
    assert text.strip() == TEXT
    assert [spelling.bytes(id) for id in tokenizer.end_ids] == [b""]


@pytest.mark.parametrize("kind", ["bytes", "pieces", "unknown"])
def test_tokens_that_differ_have_names_that_differ(kind: str) -> None:
    """Guards keys of `top_logprobs`, of which the lowest value was kept where several tokens were U+FFFD."""
    makers = {"pieces": pieces, "unknown": unknown}
    tokenizer = makers[kind]() if kind in makers else Tokenizer.from_pretrained(small.paths()[-1])
    spelling = Spelling(tokenizer)
    num_ids = tokenizer.num_ids + 8  # with ids for padding
    assert len({spelling.name(id) for id in range(num_ids)}) == num_ids
    assert "\ufffd" not in "".join(spelling.name(id) for id in range(tokenizer.num_ids))


def test_names_are_texts_where_they_can_be() -> None:
    """Guards what people read: the text of a token, its bytes for a part of a character, the sign of a special token."""
    tokenizer = pieces()
    spelling, vocab = Spelling(tokenizer), tokenizer.backend.get_vocab()
    wanted = {"Hello": "Hello", "▁Hello": " Hello", "<0xF0>": "bytes:\\xf0", "</s>": "</s>", "<0x48>": "token_id:75", "H": "H"}
    assert {piece: spelling.name(vocab[piece]) for piece in wanted} == wanted
