"""Log-probabilities in OpenAI's forms: cut with the text, offsets in characters, whole and in pieces."""

from cascade.answer import Chunk
from cascade.messages import Logprobs
from deployments.gateway.http.reply import chat_logprobs, text_logprobs

PIECES = [
    Chunk("ab", (1, 2), (1, 2), b"\0\0", logprobs=(Logprobs(-0.5, ((1, -0.5), (9, -2.0))), Logprobs(-1.0))),
    Chunk("é", (3,), (1,), b"\0", logprobs=(Logprobs(-0.1),)),
]


def test_offsets_follow_the_text() -> None:
    """Guards the places of tokens in the choice's text, after an echoed prompt too; pieces give what the whole gives."""
    whole = text_logprobs(PIECES, str, 10)
    assert whole == {
        "tokens": ["1", "2", "3"],
        "token_logprobs": [-0.5, -1.0, -0.1],
        "top_logprobs": [{"1": -0.5, "9": -2.0}, {}, {}],
        "text_offset": [10, 11, 12],
    }
    pieces = [text_logprobs([PIECES[0]], str, 10), text_logprobs([PIECES[1]], str, 12)]
    assert all(pieces[0][key] + pieces[1][key] == whole[key] for key in whole)


def test_chat_names_bytes() -> None:
    """Guards the chat form: each token with its bytes and the likeliest others."""
    content = chat_logprobs(PIECES, lambda id: "é" if id == 3 else str(id))["content"]
    assert [entry["token"] for entry in content] == ["1", "2", "é"]
    assert content[2]["bytes"] == [0xC3, 0xA9]
    assert [other["token"] for other in content[0]["top_logprobs"]] == ["1", "9"]
