"""What commands print, on `console`: text coloured by the history of its tokens, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from cascade.answer import Chunk, Completion
from cascade.bench.load import Cell, quantile
from cascade.bench.report import speed_up
from cascade.messages import Edge, origin_corrected, origin_level
from cascade.simulation.forecast import Prediction

if TYPE_CHECKING:  # importing it imports torch, and the command line is to start at once
    from cascade.settings.check import Need

console = Console(highlight=False)

# One colour a level, from the bottom: readable on light and dark, told apart by the colour-blind (Okabe, Ito 2008).
LEVEL_COLOURS = ("#009e73", "#0072b2", "#e69f00", "#cc79a7", "#56b4e9")


def level_style(level: int, corrected: bool = False) -> str:
    """Style of a token whose lowest author is the tier at ``level``; a correction is underlined."""
    return LEVEL_COLOURS[level % len(LEVEL_COLOURS)] + (" underline" if corrected else "")


def legend(names: Sequence[str]) -> Text:
    """Which colour stands for which tier."""
    text = Text()
    for level, name in enumerate(names):
        meaning = "guessed it, and all above accepted" if level < len(names) - 1 else "wrote it itself"
        text.append(f"■ {name} ", level_style(level)).append(f"{meaning}   ", "dim")
    return text.append("underlined", "underline").append(" replaced a wrong guess from below", "dim")


def coloured(chunk: Chunk) -> Text:
    """A piece of text, each token in the colour of its history."""
    text = Text(chunk.text)
    begin = 0
    for end, byte in zip(chunk.ends, chunk.origins, strict=True):
        text.stylize(level_style(origin_level(byte), origin_corrected(byte)), begin, end)
        begin = end
    return text


def show(chunk: Chunk, *, plain: bool = False) -> None:
    """Print the next piece of an answer after those before it, as `coloured` unless it is to be ``plain``."""
    console.print(Text(chunk.text) if plain else coloured(chunk), end="", soft_wrap=True)


def took(completion: Completion, seconds: float | None = None) -> str:
    """What it took to write a text, in one line; with its speed if it took so many ``seconds``."""
    stats = completion.stats
    rule = "" if stats.rule == "coupled" else f", rule {stats.rule}"
    speed = f", {stats.completion_tokens / seconds:.1f} tokens/s" if seconds else ""
    return (
        f"{stats.completion_tokens} tokens in {stats.full_passes} full passes "
        f"({stats.tokens_per_full_pass:.2f} tokens per pass){speed}, finish: {completion.finish_reason}, "
        f"seed {completion.seed}{rule}"
    )


def logprobs(completion: Completion) -> Table:
    """Log-probability of each token, and the likeliest tokens in its place."""
    table = Table("token id", "log-probability", "likeliest token ids", title="Log-probabilities of the full model")
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        table.add_row(str(token), f"{entry.logprob:.3f}", "  ".join(f"{id} {value:.3f}" for id, value in entry.top))
    return table


def speeds(cells: Sequence[Cell]) -> Table:
    """Tokens per second of each mode beside the first one."""
    mode = Column("mode", no_wrap=True)
    table = Table(mode, "tokens/s", "speed-up", "tokens per full pass", "first token", title="Speed")
    for cell in cells:
        table.add_row(
            cell.mode.name,
            f"{cell.tokens_per_second:.1f}",
            f"{speed_up(cell, cells):.2f}x",
            f"{cell.tokens_per_full_pass:.2f}",
            f"{quantile(cell.first_token_s, 0.5) * 1e3:.0f} ms",
        )
    return table


def acceptance(edges: Iterable[Edge]) -> Table:
    """What happened on each edge: of the guesses that were scored, and the runner-ups among them, how many were right;
    of the corrections how many were prepared, and how many tokens waited after one of these."""
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


def predictions(rows: Iterable[Prediction]) -> Table:
    """What the simulator predicts for each choice of tiers."""
    schedule = Column("schedule", no_wrap=True)
    table = Table("tiers", schedule, "window", "tokens/s", "speed-up", "tokens per full pass", "bubble", title="Predicted")
    for row in rows:
        shape = (", trees" if row.branches else ", lines") if row.schedule == "async" else ""
        table.add_row(
            " → ".join(row.tiers),
            row.schedule + shape,
            str(row.window or "-"),
            f"{row.tokens_per_s:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.tokens_per_pass:.2f}",
            f"{row.bubble_s * 1e3:.1f} ms",
        )
    return table


def needs(tiers: Iterable[Need]) -> Table:
    """What each tier needs of its device; not wider than a terminal of 80 columns."""
    columns = ("tier", "size", "weights", "dtype", "device", "fits", "context")
    table = Table(*columns, title="Tiers", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for need in tiers:
        model, ranks = need.anatomy, f"{need.ranks} x " if need.ranks > 1 else ""
        table.add_row(
            need.tier,
            _parameters(model.parameters),
            _bytes(model.weight_bytes) + (f"\n+ {_bytes(need.drafter_bytes)} drafter" if need.drafter_bytes else ""),
            str(model.dtype).removeprefix("torch.") + (f"\n{need.quantization}" if need.quantization else ""),
            f"{ranks}{need.device}, {_bytes(need.device_bytes)}\n{need.engine} engine",
            f"{max(0, need.cache_tokens):,} tokens\nof {_bytes(model.cache_bytes_per_token)}",
            f"{model.context_len:,}",
        )
    return table


def _parameters(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _bytes(number: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} B"
