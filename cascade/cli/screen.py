"""Output of commands on `console`: text in the colours of the tiers that guessed it, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from cascade.answer import Chunk, Completion
from cascade.messages import Edge, origin_level, origin_replaced

if TYPE_CHECKING:  # importing it imports PyTorch, and the command line starts at once
    from cascade.settings.check import Need

console = Console(highlight=False)

WIDE = "\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef"  # Chinese, Japanese and Korean characters, between which a line may break
PARTS = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")  # words, and blanks between them
# One colour a level, from the bottom; readable on light and dark, and for the colour-blind (Okabe, Ito 2008).
LEVEL_COLOURS = ("#009e73", "#0072b2", "#e69f00", "#cc79a7", "#56b4e9")


def level_style(level: int, corrected: bool = False) -> str:
    """Style of a token that the tier at ``level`` was the first to guess; a correction is underlined."""
    return LEVEL_COLOURS[level % len(LEVEL_COLOURS)] + (" underline" if corrected else "")


def legend(names: Sequence[str]) -> Text:
    """The colour of each tier."""
    text = Text()
    for level, name in enumerate(names):
        meaning = "guessed it, and all above accepted" if level < len(names) - 1 else "wrote it itself"
        text.append(f"■ {name} ", level_style(level)).append(f"{meaning}   ", "dim")
    return text.append("underlined", "underline").append(" replaced a wrong guess", "dim")


class Answer:
    """An answer as it comes; unless it is ``plain``, each token has its tier's colour.

    At a terminal a word that does not fit into the line begins the next one. So the last word is held until it is whole.
    """

    def __init__(self, *, plain: bool = False, after: str = "") -> None:
        """``after`` is the text that precedes it on the screen."""
        self._plain = plain
        self._word = Text()  # the last word, which may continue
        self._column = cell_len(after.rpartition("\n")[2]) % console.width  # occupied cells of the line

    def show(self, chunk: Chunk) -> None:
        text = Text(chunk.text)
        if not self._plain:
            begin = 0
            for end, byte in zip(chunk.ends, chunk.origins, strict=True):
                text.stylize(level_style(origin_level(byte), corrected=origin_replaced(byte) is not None), begin, end)
                begin = end
        if not console.is_terminal:
            self._print(text)
            return
        self._word += text
        parts = [match.end() for match in PARTS.finditer(self._word.plain)]
        *whole, self._word = self._word.divide(parts[:-1]) if parts else [Text()]
        for part in whole:
            self._place(part)
        if chunk.completion is not None:
            self.end()

    def end(self) -> None:
        """Print what is left, if the answer ends without its last piece."""
        self._place(self._word)
        self._word = Text()

    def _place(self, part: Text) -> None:
        """Print a word or a blank, in the next line if it does not fit into this one."""
        if part.plain == "\n":
            self._column = 0
        elif self._column and self._column + part.cell_len > console.width:
            self._print(Text("\n"))
            self._column = 0
            if part.plain.isspace():
                return
        self._column += part.cell_len if part.plain != "\n" else 0
        if self._column > console.width:  # a word longer than a line, which the terminal breaks
            self._column %= console.width
        self._print(part)

    def _print(self, text: Text) -> None:
        console.print(text, end="", soft_wrap=True)


def summary(completion: Completion) -> str:
    """Statistics of a text, in one line."""
    stats = completion.stats
    return (
        f"{stats.completion_tokens} tokens in {stats.full_passes} full passes ({stats.tokens_per_full_pass:.2f} tokens per "
        f"pass), finish: {completion.finish_reason}, seed {completion.seed}"
    )


def acceptance(edges: Iterable[Edge]) -> Table:
    """Statistics of each edge: passes, accepted guesses and runner-ups, prepared corrections."""
    columns = ("edge", "passes", "accepted", "runner-ups", "prepared", "a pass", "wait, s")
    table = Table(*(Column(name, no_wrap=True) for name in columns), title="Edges", box=SIMPLE_HEAD, pad_edge=False)
    for edge in edges:
        scored, right = edge.runner_ups
        ready = f" +{edge.prefetched_tokens / edge.prefetched:.1f}" if edge.prefetched else ""
        table.add_row(
            f"{edge.drafter or '(alone)'} → {edge.verifier}",
            str(edge.passes),
            f"{edge.accepted}/{edge.proposed} {edge.accepted / edge.proposed:.0%}" if edge.proposed else "-",
            f"{right}/{scored}" if scored else "-",
            f"{edge.prefetched}/{edge.corrected}{ready}" if edge.corrected else "-",
            f"{edge.mean_accepted_len:.2f}" if edge.passes else "-",
            f"{edge.waited_s:.2f}",
        )
    return table


def needs(tiers: Iterable[Need]) -> Table:
    """A table of what each tier needs from its device; at most 80 columns wide."""
    columns = ("tier", "size", "weights", "dtype", "device", "fits", "context")
    table = Table(*columns, title="Tiers", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for need in tiers:
        model, ranks = need.anatomy, f"{need.ranks} x " if need.ranks > 1 else ""
        table.add_row(
            need.tier,
            f"{model.parameters / 1e9:.2f} B" if model.parameters >= 1e9 else f"{model.parameters / 1e6:.1f} M",
            _bytes(model.weight_bytes) + (f"\n+ {_bytes(need.drafter_bytes)} drafter" if need.drafter_bytes else ""),
            str(model.dtype).removeprefix("torch.") + (f"\n{need.quantization}" if need.quantization else ""),
            f"{ranks}{need.device}, {_bytes(need.device_bytes)}\n{need.engine} engine",
            f"{max(0, need.cache_tokens):,} tokens\nof {_bytes(need.cache_bytes_per_token)}",
            f"{model.context_len:,}",
        )
    return table


def _bytes(number: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} B"
