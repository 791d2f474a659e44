"""`cascade generate`: one answer, from a server or from models that run here."""

import os
import sys
from typing import Any

import click

from cascade.bench.measure import Stream
from cascade.cli import screen
from cascade.cli.options import parameters, sampling_options
from cascade.cli.screen import console
from cascade.params import Handling, SamplingParams, Speculation

DEFAULT_ADDRESS = "127.0.0.1:9000"


@click.command()
@click.argument("prompt")
@click.option("--address", help=f"Of a server. Without one the models run here. Example: {DEFAULT_ADDRESS}")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="A path or hub id, bottom to top; repeat. SmolLM2-135M-Instruct and its tiers if none.",
)
@click.option("--plain", is_flag=True, help="No colours, no statistics.")
@sampling_options
def generate(prompt: str, address: str | None, models: tuple[str, ...], plain: bool, **options: Any) -> None:
    """Go on with PROMPT ("-" reads it from standard input), streaming."""
    params, speculation = parameters(options)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    with connected(address, models) as (stream, names):
        if plain:
            for chunk in stream(prompt, params, speculation, Handling()):
                click.echo(chunk.text, nl=False)
            click.echo()
        else:
            show_stream(stream, prompt, params, speculation, names)


def show_stream(stream: Stream, prompt: str, params: SamplingParams, speculation: Speculation, names: tuple[str, ...]) -> None:
    """Print the answer as it comes, coloured by history, and what it took."""
    console.print(screen.legend(names), "\n")
    console.print(prompt, end="", style="dim", markup=False)
    completion = None
    for chunk in stream(prompt, params, speculation, Handling()):
        console.print(screen.coloured(chunk), end="")
        completion = chunk.completion or completion
    console.print("\n")
    if completion is not None:
        if completion.logprobs:
            console.print(screen.logprobs(completion))
        stats = completion.stats
        rule = "" if stats.rule == "coupled" else f", rule {stats.rule}"
        console.print(
            f"{stats.completion_tokens} tokens in {stats.full_passes} full passes "
            f"({stats.tokens_per_full_pass:.2f} tokens per pass), finish: {completion.finish_reason}, "
            f"seed {completion.seed}{rule}\n"
        )
        if any(edge.drafter for edge in stats.edges):
            console.print(screen.acceptance(stats.edges))


class connected:
    """A stream function and the names of the tiers: of a server, or of a cascade that runs here."""

    def __init__(self, address: str | None, models: tuple[str, ...]) -> None:
        self._address = address
        self._models = models

    def __enter__(self) -> tuple[Stream, tuple[str, ...]]:
        if self._address:
            from cascade.client import Client

            self._open: Any = Client(self._address, api_key=os.environ.get("CASCADE_API_KEY"))
            served = self._open.describe()
            return self._open.stream, (*served.drafters, *(tier.name for tier in served.tiers))
        if not self._models:
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # these models load in no time
        from cascade.local import Cascade

        with console.status("Loading models"):
            # one answer of the demonstration family is there before processes for its tiers are
            self._open = Cascade.from_pretrained(self._models) if self._models else Cascade.demo(processes=False)
        return self._open.stream, self._open.names

    def __exit__(self, *error: object) -> None:
        self._open.close()
