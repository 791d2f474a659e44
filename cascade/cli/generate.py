"""`cascade generate`: one answer, from a server or from models in this process."""

import sys
from typing import Any

import click

from cascade.cli import screen
from cascade.cli.connection import DEFAULT_ADDRESS, connected
from cascade.cli.options import parameters, sampling_options
from cascade.cli.screen import console
from cascade.params import Handling


@click.command()
@click.argument("prompt")
@click.option("--address", help=f"A server's gRPC address, such as {DEFAULT_ADDRESS}; by default the models run here.")
@click.option(
    "--model", "models", multiple=True, help="Path or hub id, bottom to top; repeat. By default the models that ship."
)
@click.option("--plain", is_flag=True, help="No colours, no statistics.")
@sampling_options
def generate(prompt: str, address: str | None, models: tuple[str, ...], plain: bool, **options: Any) -> None:
    """Continue PROMPT ("-" reads it from standard input), and stream the text. For conversations see `cascade chat`."""
    sampled, speculation = parameters(options)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    with connected(address, models) as backend:
        chunks = backend.stream(prompt, sampled(backend.default_params), speculation, Handling())
        if plain:
            for chunk in chunks:
                click.echo(chunk.text, nl=False)
            click.echo()
            return
        console.print(screen.legend(backend.names), "\n")
        console.print(prompt, end="", style="dim", markup=False)
        shown = screen.Answer(after=prompt)
        for chunk in chunks:
            shown.show(chunk)
            if chunk.completion is not None:
                console.print(f"\n\n{screen.summary(chunk.completion)}\n")
                console.print(screen.acceptance(chunk.completion.stats.edges))
