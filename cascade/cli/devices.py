"""Simulates the same answers with a device for each tier, for `cascade demo` on machines without such devices.

The draft models give their own tokens along the answers. Passes take as long as those of a published trio on published devices
(`cascade.simulation.costs`). The simulator runs the server's own loops.
"""

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from cascade.agreement import Written, along
from cascade.cli.screen import console
from cascade.engine.tokenizer import Tokenizer
from cascade.params import SamplingParams
from cascade.simulation.costs import QWEN3, TRIO
from cascade.simulation.plan import recorded_tiers, timelines
from cascade.simulation.recording import Recording

FRAMES_S = 0.05  # between two pictures
LINES = 14  # a pane's height


@dataclass(frozen=True, slots=True)
class Simulated:
    """When each token of each answer comes, in seconds after its request, and how often the draft tiers agree."""

    alone: list[tuple[float, ...]]
    cascade: list[tuple[float, ...]]
    agreement: Mapping[str, float]  # by draft tier: agreement with the full model
    models: tuple[str, ...]  # published models whose pass times are used, bottom to top

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second of all answers, alone and with drafts."""
        tokens = sum(map(len, self.alone))
        return tokens / sum(times[-1] for times in self.alone), tokens / sum(times[-1] for times in self.cascade)


def simulated(
    sources: Mapping[str, str], texts: Sequence[Written], params: SamplingParams, kinds: Sequence[str], vocab: int
) -> Simulated:
    """Simulate answers that the full model gave with ``params``, with a device for each tier.

    ``sources`` are two or three models by tier, bottom to top.
    """
    recording: Recording = along([*sources.values()][:-1], texts, [params] * len(texts), kinds)
    full = len(sources) - 1
    tiers = recorded_tiers([*sources], (*QWEN3[:full], QWEN3[-1]), recording, vocab)
    models = [*TRIO]
    return Simulated(
        timelines(tiers, recording, drafts=False),
        timelines(tiers, recording, drafts=True),
        {name: recording.shared(tier, full) for tier, name in enumerate([*sources][:-1])},
        (*models[:full], models[-1]),
    )


def panes(outcome: Simulated, texts: Sequence[Written], tokenizer: Tokenizer) -> None:
    """Show two panes that fill at the simulated speeds; does nothing unless the output is a terminal."""
    if not console.is_terminal:
        return
    sides = [_joined(outcome.alone), _joined(outcome.cascade)]
    tokens = [token for _, output in texts for token in output]
    begin, end = time.monotonic(), sides[0][-1]
    with Live(console=console, transient=True, refresh_per_second=1 / FRAMES_S) as live:
        while (now := time.monotonic() - begin) < end:
            names = ("full model alone, simulated GPU", "cascade, simulated GPUs")
            live.update(Columns([_pane(name, tokens, side, now, tokenizer) for name, side in zip(names, sides, strict=True)]))
            time.sleep(FRAMES_S)


def _joined(answers: Sequence[tuple[float, ...]]) -> list[float]:
    """Times of all tokens, with the answers one after the other."""
    times, begin = [], 0.0
    for answer in answers:
        times += [begin + at for at in answer]
        begin = times[-1]
    return times


def _pane(name: str, tokens: Sequence[int], times: Sequence[float], now: float, tokenizer: Tokenizer) -> Panel:
    count = bisect_right(times, now)
    width = max(20, console.width // 2 - 4)
    text = Text(tokenizer.decode(tokens[max(0, count - LINES * 12) : count]))
    lines = text.wrap(console, width)[-LINES:]
    body = Text("\n").join(lines)
    title = f"{name}: {count} tokens, {min(now, times[-1]):.1f} s"
    return Panel(body, title=title, width=width + 4, height=LINES + 2)
