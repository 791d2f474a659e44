"""`cascade generate`: one answer, from a server or from models that run here."""

import sys
from typing import Any

import click

from cascade.cli import screen
from cascade.cli.connection import DEFAULT_ADDRESS, connected
from cascade.cli.options import named_models, parameters, sampling_options
from cascade.cli.screen import console
from cascade.params import Handling


@click.command()
@click.argument("prompt")
@click.option("--address", help=f"Of a server. Without one the models run here. Example: {DEFAULT_ADDRESS}")
@named_models
@click.option("--plain", is_flag=True, help="No colours, no statistics.")
@sampling_options
def generate(prompt: str, address: str | None, models: tuple[str, ...], plain: bool, **options: Any) -> None:
    """Go on with PROMPT ("-" reads it from standard input), streaming. Raw text: see `cascade chat` for conversations."""
    params, speculation = parameters(options)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    with connected(address, models) as asked:
        chunks = asked.stream(prompt, params, speculation, Handling())
        if plain:
            for chunk in chunks:
                click.echo(chunk.text, nl=False)
            click.echo()
            return
        console.print(screen.legend(asked.names), "\n")
        console.print(prompt, end="", style="dim", markup=False)
        completion = None
        for chunk in chunks:
            screen.show(chunk)
            completion = chunk.completion or completion
        console.print("\n")
        if completion is not None:
            if completion.logprobs:
                console.print(screen.logprobs(completion))
            console.print(screen.took(completion), "\n")
            if any(edge.drafter for edge in completion.stats.edges):
                console.print(screen.acceptance(completion.stats.edges))
