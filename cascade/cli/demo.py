"""`cascade demo`: five questions to a served cascade; speeds with and without drafts, here and with simulated GPUs."""

import json
import os
import secrets
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from cascade.answer import Completion
from cascade.cli import screen
from cascade.cli.chat import Backend, Message, connected
from cascade.cli.options import DRAFT
from cascade.cli.screen import console
from cascade.cli.serve import configured, started
from cascade.params import Handling, SamplingParams, Speculation
from cascade.prompts import read_prompts

if TYPE_CHECKING:  # both import PyTorch, which starts slowly
    from cascade.agreement import Written
    from cascade.engine.tokenizer import Tokenizer
    from cascade.scorer import Drafter
    from cascade.settings.config import CascadeConfig

FOLDER = Path(__file__).parent
QUESTIONS = {prompt.category: prompt.text for prompt in read_prompts(FOLDER / "questions.jsonl")}  # by kind
# a conversation whose answer repeats a program in the prompt, where drafters find it
AGAIN: Sequence[Message] = tuple(json.loads((FOLDER / "again.json").read_text(encoding="utf-8")))
PARAMS = SamplingParams(max_tokens=96, temperature=0, seed=1)
MODES = {"full model alone": Speculation("off"), "cascade": Speculation()}
COMPARED = ("code", "mathematics", "rewrite")  # kinds of the questions that both modes answer at each temperature
COMPARED_TOKENS, AGAIN_TOKENS = 64, 192  # limits of answers, so that the demo ends within two minutes on two cores
MOST_DRAFTS = 2  # models below the full one: the simulation has prices for a published trio
WARM_TOKENS = 16  # limit of the first answer of each mode, which does not count
FRAMES_S = 0.05  # between two pictures
PANE_LINES = 14


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens per second of the same answers without and with drafts."""

    what: str
    alone: float
    cascade: float
    note: str  # a sentence that explains the figures
    same: bool = True  # whether the texts are the same


@click.command()
@click.argument("model", required=False)
@DRAFT
def demo(model: str | None, drafts: tuple[str, ...]) -> None:
    """Serve the models that ship, or MODEL with drafts; ask five questions; compare speeds without drafts; shut down.

    \b
    cascade demo Qwen/Qwen2.5-Coder-1.5B-Instruct --draft Qwen/Qwen2.5-Coder-0.5B-Instruct
    """
    if len(drafts) > MOST_DRAFTS:
        raise click.UsageError(f"--draft is given {len(drafts)} times: the demo has room for {MOST_DRAFTS}")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the models that ship load at once
    name = f"cascade-demo-{secrets.token_hex(3)}"  # a cluster may run other demos
    config = configured(model, drafts)
    with started(config, port=0, name=name) as server, connected(server.address) as served:
        console.print("Five questions to a cascade on this machine, then the same with drafts and without.")
        console.print(roles(served.names, len(config.tiers)))
        console.print(screen.legend(served.names))
        answers = {kind: answer(served, kind, question) for kind, question in QUESTIONS.items()}
        console.print()
        with console.status("The full model alone and the cascade answer in turns"):
            few = [[{"role": "user", "content": QUESTIONS[kind]}] for kind in COMPARED]
            rows = [compared(served, f"{len(few)} questions, temperature {t:g}", few, COMPARED_TOKENS, t) for t in (0.0, 0.7)]
            rows.append(compared(served, "a program printed again", [AGAIN], AGAIN_TOKENS))
    if len(config.tiers) > 1:
        rows.append(on_devices(config, answers))
    show(rows)
    if not all(row.same for row in rows):
        raise click.exceptions.Exit(1)


def roles(names: Sequence[str], num_tiers: int) -> str:
    """Explains the names of a cascade: drafters that need no model, and tiers, bottom to top."""
    *smaller, full = names[-num_tiers:]
    readers = names[:-num_tiers]
    kinds = {"guesses without a model": readers, "smaller models": smaller, "the model itself, which has the last word": [full]}
    return "; ".join(f"{', '.join(group)}: {kind}" for kind, group in kinds.items() if group) + "."


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def answer(served: Backend, kind: str, question: str) -> Completion:
    """Ask a question and print the answer, each token in the colour of the tier that guessed it."""
    console.print(f"\n[bold]{kind.capitalize()}[/]")
    console.print(question, style="dim", markup=False)
    shown = screen.Answer()
    for piece in served.stream_chat([{"role": "user", "content": question}], PARAMS, Speculation(), Handling()):
        shown.show(piece.chunk)
    completion = piece.chunk.completion
    assert completion is not None, "a stream ends with its completion"
    more = " ..." if completion.finish_reason == "length" else ""
    console.print(f"{more}\n[dim]{screen.summary(completion)}[/]")
    return completion


def explained(names: Sequence[str], answers: Sequence[Completion]) -> str:
    """A sentence: how many passes the answers took, and which of the drafters in ``names`` the planner used."""
    edges = [edge for completion in answers for edge in completion.stats.edges if edge.verifier == names[-1] and edge.proposed]
    used = [name for name in names[:-1] if any(edge.drafter == name for edge in edges)]
    others = [name for name in names[:-1] if name not in used]
    tokens = sum(completion.stats.completion_tokens for completion in answers)
    passes = sum(completion.stats.full_passes for completion in answers)
    guessed = f"{listed(used) or 'no drafter'} guessed" + (f", and the planner left out {listed(others)}" if others else "")
    return f"{tokens} tokens took {passes} passes of the full model; {guessed}."


def compared(
    served: Backend, what: str, conversations: Sequence[Sequence[Message]], max_tokens: int, temperature: float = 0.0
) -> Row:
    """Let the full model alone and the cascade answer ``conversations`` in turns."""
    params = replace(PARAMS, max_tokens=max_tokens, temperature=temperature)
    for mode in MODES:
        timed(served, conversations[0], replace(params, max_tokens=min(WARM_TOKENS, max_tokens)), mode)
    seconds = dict.fromkeys(MODES, 0.0)
    answers: dict[str, list[Completion]] = {mode: [] for mode in MODES}
    for number, conversation in enumerate(conversations):
        for mode in list(MODES)[:: 1 if number % 2 else -1]:  # so that neither mode always comes first
            completion, took = timed(served, conversation, params, mode)
            answers[mode].append(completion)
            seconds[mode] += took
    texts = {mode: [completion.token_ids for completion in answers[mode]] for mode in MODES}
    alone, cascade = (sum(map(len, texts[mode])) / seconds[mode] for mode in MODES)
    note = explained(served.names, answers["cascade"])
    return Row(what, alone, cascade, note, texts["full model alone"] == texts["cascade"])


def timed(served: Backend, conversation: Sequence[Message], params: SamplingParams, mode: str) -> tuple[Completion, float]:
    """The answer in a mode, without reuse of other answers, and the seconds that it took."""
    begin = time.perf_counter()
    handling = Handling(cache_salt=secrets.token_hex())
    *_, last = served.stream_chat(conversation, params, MODES[mode], handling)
    assert last.chunk.completion is not None, "a stream ends with its completion"
    return last.chunk.completion, time.perf_counter() - begin


def on_devices(config: "CascadeConfig", answers: Mapping[str, Completion]) -> Row:
    """Simulate how fast the same answers come with a GPU for each tier; at a terminal, two panes show it."""
    from cascade.agreement import chat_ids
    from cascade.drafters import make
    from cascade.engine.tokenizer import Tokenizer

    sources = {tier.name: tier.model_loading_config.source for tier in config.tiers}
    tokenizer = Tokenizer.from_pretrained([*sources.values()][-1])
    texts = [(tuple(chat_ids(tokenizer, QUESTIONS[kind])), completion.token_ids) for kind, completion in answers.items()]
    with console.status("The draft models guess along these answers"):
        readers = [drafter for drafter in config.tiers[-1].engine_kwargs.drafters if not drafter.reads]
        drafters = make(readers, config.drafters, tokenizer.encode)
        outcome = simulated(sources, drafters, texts, PARAMS, list(answers), tokenizer.num_ids)
    panes(outcome, texts, tokenizer)
    alone, cascade = outcome.speeds
    names = (*(drafter.name for drafter in drafters), *sources)
    shares = listed([f"{name} in {share:.2f}" for name, share in outcome.agreement.items()])
    note = (
        f"computed, not measured, for passes as long as those of {listed(outcome.models)} on an H100 each; guesses are those "
        f"of {listed([*names[:-1]])} here. Of tokens of these answers the models agree with the full one: {shares}."
    )
    return Row(f"{len(texts)} questions, simulated GPUs", alone, cascade, note)


def show(rows: Sequence[Row]) -> None:
    """Print a table, a sentence on each row, and whether drafts changed a text."""
    numbers = (Column(name, justify="right", no_wrap=True) for name in (*MODES, "speed-up"))
    table = Table(Column("tokens per second"), *numbers, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.what, f"{row.alone:.1f}", f"{row.cascade:.1f}", f"{row.cascade / row.alone:.2f}x")
    console.print(table)
    for row in rows:
        console.print(f"- {row.what}: {row.note}", soft_wrap=True)
    same = all(row.same for row in rows)
    console.print("Every text was the same with and without drafts." if same else "[bold red]Drafts changed a text.[/]")


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
    sources: Mapping[str, str],
    drafters: "Sequence[Drafter]",
    texts: "Sequence[Written]",
    params: SamplingParams,
    kinds: Sequence[str],
    vocab: int,
) -> Simulated:
    """Simulate answers that the full model gave with ``params``, with a device for each tier.

    ``sources`` are two or three models by tier, bottom to top; ``drafters`` are inside the full one. The draft models give
    their own tokens along the answers, and passes take as long as those of a published trio on published devices
    (`cascade.simulation.costs`).
    """
    from cascade.agreement import along
    from cascade.simulation.costs import QWEN3, TRIO
    from cascade.simulation.plan import recorded_tiers, timelines

    recording = along([*sources.values()][:-1], texts, [params] * len(texts), kinds)
    full = len(sources) - 1
    tiers = recorded_tiers([*sources], (*QWEN3[:full], QWEN3[-1]), recording, vocab, drafters)
    models = [*TRIO]
    return Simulated(
        timelines(tiers, recording, drafts=False),
        timelines(tiers, recording, drafts=True),
        {name: recording.shared(tier, full) for tier, name in enumerate([*sources][:-1])},
        (*models[:full], models[-1]),
    )


def panes(outcome: Simulated, texts: "Sequence[Written]", tokenizer: "Tokenizer") -> None:
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


def _pane(name: str, tokens: Sequence[int], times: Sequence[float], now: float, tokenizer: "Tokenizer") -> Panel:
    count = bisect_right(times, now)
    width = max(20, console.width // 2 - 4)
    text = Text(tokenizer.decode(tokens[max(0, count - PANE_LINES * 12) : count]))
    lines = text.wrap(console, width)[-PANE_LINES:]
    body = Text("\n").join(lines)
    title = f"{name}: {count} tokens, {min(now, times[-1]):.1f} s"
    return Panel(body, title=title, width=width + 4, height=PANE_LINES + 2)
