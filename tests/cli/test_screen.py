"""How answers look at a terminal."""

import io

import pytest
from rich.console import Console

from cascade import Chunk
from cascade.cli import screen

TEXT = "Speculative decoding lets smaller models run ahead.\n\nIt changes no token: 你好世界你好世界你好 " + "x" * 50 + " end"


def pieces(text: str) -> list[Chunk]:
    """Of three letters, as tokens are: most words come in several."""
    cut = [text[i : i + 3] for i in range(0, len(text), 3)]
    return [Chunk(part, token_ids=(7,), ends=(len(part),), origins=b"\0") for part in cut]


@pytest.mark.parametrize("width", [12, 20, 31])
@pytest.mark.parametrize("plain", [False, True])
def test_words_are_not_broken_at_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch, width: int, plain: bool) -> None:
    """Guards words that came in pieces: a terminal broke them wherever its line ended."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, highlight=False, no_color=True)
    monkeypatch.setattr(screen, "console", console)
    answer = screen.Answer(plain=plain)
    for chunk in pieces(TEXT):
        answer.show(chunk)
    answer.end()
    said = out.getvalue()
    assert said.split() == TEXT.split() or "".join(said.split()) == "".join(TEXT.split())
    for line in said.split("\n"):
        assert len(line.rstrip()) <= width or "x" * width in line or "你" in line
    for word in ("Speculative", "decoding", "smaller", "changes", "token:"):
        assert word in said or len(word) > width
    assert ahead(said) == ahead(TEXT), "a new line is not lost"


def ahead(text: str) -> int:
    return text.count("\n\n")


def test_pipes_get_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards scripts: what is no terminal gets no breaks."""
    out = io.StringIO()
    monkeypatch.setattr(screen, "console", Console(file=out, width=10, highlight=False))
    answer = screen.Answer(plain=True)
    for chunk in pieces(TEXT):
        answer.show(chunk)
    answer.end()
    assert out.getvalue() == TEXT
