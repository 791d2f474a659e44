"""`cascade demo`: a few questions to a served cascade, and a comparison with its full model alone."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from cascade.answer import Chunk
from cascade.bench.load import Mode, Workload, joined, load, same_text
from cascade.bench.prompts import QUESTIONS, Prompt
from cascade.cli import screen
from cascade.cli.bench import modes
from cascade.cli.config import configured
from cascade.cli.connection import Served, stream_for
from cascade.cli.screen import console
from cascade.cli.serve import started
from cascade.errors import CascadeError
from cascade.params import Handling, SamplingParams, Speculation

Stream = Callable[[str, SamplingParams, Speculation, Handling], Iterator[Chunk]]

COMPARED = ("code", "mathematics", "rewrite")  # kinds of the questions that both modes answer, at each temperature
COMPARED_TOKENS = 64  # of such an answer at most: the whole is to be over in a minute, on two cores
WARM_TOKENS = 16  # likewise of the first answer of each, which does not count


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--max-tokens", type=click.IntRange(1), default=96, show_default=True, help="Of each answer that is shown.")
@click.option("--temperature", "-t", type=float, help="Of all answers; of the compared ones 0 and then 0.7 if not given.")
def demo(config: Path | None, max_tokens: int, temperature: float | None) -> None:
    """Start a cascade on this machine, ask it five questions, compare it with its full model alone, shut down.

    The cascade is the one that ships, or that of CONFIG, a YAML file.
    """
    from cascade.client import Client

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature or 0.0, seed=1)
    name = f"cascade-demo-{secrets.token_hex(3)}"  # on a cluster that is joined others may run
    with (
        started(configured(None if config is None else str(config)), port=0, name=name) as server,
        Client(server.address) as client,
    ):
        served = Served(client)
        stream = stream_for(served)
        console.print(screen.legend(served.names))
        for question in QUESTIONS:
            answer(stream, question, params)
        short = replace(params, max_tokens=min(max_tokens, COMPARED_TOKENS))
        for compared in (0.0, 0.7) if temperature is None else (temperature,):
            compare(stream, replace(short, temperature=compared), modes(served.names, pairs=False)[:2])


def answer(stream: Stream, question: Prompt, params: SamplingParams) -> None:
    """Ask and print, coloured by which tier's guess survived."""
    console.print(f"\n[bold]{question.category.capitalize()}[/]")
    console.print(question.text, style="dim", markup=False)
    for chunk in stream(question.text, params, Speculation(), Handling()):
        screen.show(chunk)
        if chunk.completion is not None:
            more = " ..." if chunk.completion.finish_reason == "length" else ""
            console.print(f"{more}\n[dim]{screen.took(chunk.completion)}[/]")


def compare(stream: Stream, params: SamplingParams, compared: Sequence[Mode]) -> None:
    """Have every mode answer some of the questions in turns; print how fast each was, and whether all said the same."""
    prompts = tuple(question for question in QUESTIONS if question.category in COMPARED)
    workload = Workload(tuple(compared), prompts, (1,), params, warm_tokens=WARM_TOKENS)

    async def ask(*how: Any) -> AsyncGenerator[Chunk, None]:
        for chunk in stream(*how):  # one request at a time: nobody waits for this loop
            yield chunk

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=workload.num_requests)
        cells = asyncio.run(load(ask, workload, lambda: progress.advance(task)))
    if errors := [error for cell in cells for error in cell.errors]:
        raise CascadeError(errors[0])
    results = joined(cells)
    console.print(f"\n[bold]Temperature {params.temperature:g}[/]")
    console.print(screen.speeds(results))
    console.print(screen.acceptance(results[-1].edges.values()))
    console.print("All modes gave the same text." if same_text(cells) else "[bold red]The modes gave different texts.[/]")
