"""`cascade demo`: a few questions to a served cascade, and a comparison with its full model alone."""

import asyncio
import secrets
from dataclasses import replace

import click

from cascade.bench.load import Cell, Workload
from cascade.bench.prompts import QUESTIONS, Prompt
from cascade.cli import screen
from cascade.cli.bench import measured, modes, show
from cascade.cli.config import configured
from cascade.cli.connection import Local, Served, asked, connected, user_turn
from cascade.cli.screen import console
from cascade.cli.serve import started
from cascade.params import Handling, SamplingParams, Speculation

PARAMS = SamplingParams(max_tokens=96, temperature=0, seed=1)
COMPARED = ("code", "mathematics", "rewrite")  # kinds of the questions that both modes answer, at each temperature
COMPARED_TOKENS = 64  # of such an answer at most: the whole is to be over in a minute, on two cores
WARM_TOKENS = 16  # likewise of the first answer of each, which does not count


@click.command()
def demo() -> None:
    """Serve the models that ship, ask them five questions, compare with the full model alone, shut down."""
    name = f"cascade-demo-{secrets.token_hex(3)}"  # on a cluster that is joined others may run
    with started(configured(None), port=0, name=name) as server:
        with connected(server.address) as served:
            console.print(screen.legend(served.names))
            for question in QUESTIONS:
                answer(served, question)
        for temperature in (0.0, 0.7):
            compare(server.address, temperature)


def answer(served: Local | Served, question: Prompt) -> None:
    """Ask and print, each token in the colour of the tier that guessed it."""
    console.print(f"\n[bold]{question.category.capitalize()}[/]")
    console.print(question.text, style="dim", markup=False)
    shown = screen.Answer()
    for piece in served.stream_chat(user_turn(question.text), PARAMS, Speculation(), Handling()):
        shown.show(piece.chunk)
        if (completion := piece.chunk.completion) is not None:
            more = " ..." if completion.finish_reason == "length" else ""
            console.print(f"{more}\n[dim]{screen.summary(completion)}[/]")


def compare(address: str, temperature: float) -> None:
    """Have the full model alone and the cascade answer some of the questions in turns; print how fast each was."""
    prompts = tuple(question for question in QUESTIONS if question.category in COMPARED)
    params = replace(PARAMS, max_tokens=COMPARED_TOKENS, temperature=temperature)

    async def measure() -> list[Cell]:
        async with asked(address) as backend:
            workload = Workload(modes(backend.names, pairs=False)[:2], prompts, (1,), params, warm_tokens=WARM_TOKENS)
            return await measured(backend.stream, workload)

    console.print(f"\n[bold]Temperature {temperature:g}[/]")
    cells = asyncio.run(measure())
    show(cells)
    if any(cell.errors for cell in cells):
        raise click.exceptions.Exit(1)
