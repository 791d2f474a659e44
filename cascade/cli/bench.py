"""`cascade bench`: the cascade beside the full model alone, under load."""

import asyncio
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cascade.bench import report
from cascade.bench.load import AsyncStream, Cell, Mode, Workload, joined, load, same_text
from cascade.bench.prompts import BUILT_IN, read_prompts
from cascade.cli.connection import DEFAULT_ADDRESS, Backend, asked
from cascade.cli.options import counts, named_models
from cascade.cli.screen import acceptance, console
from cascade.params import SamplingParams, Speculation


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuses a file without a folder now, not after minutes of measuring."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} is no folder: make it first")
    return value


@click.command()
@click.option("--address", help=f"Of a server, such as {DEFAULT_ADDRESS}. Without one the models run here.")
@named_models
@click.option("--concurrency", default="1", show_default=True, callback=counts, help="Requests at once; such as 1,4,16.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file, one a line: text, or JSON as in Spec-Bench, HumanEval or GSM8K. Six kinds of eight if not given.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Output tokens at most.")
@click.option("--temperature", "-t", default=0.0, show_default=True, help="0 is greedy, as runs that compare are; 1 elsewhere.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Times each prompt is sent in each mode.")
@click.option("--pairs", is_flag=True, help="Also measure each lower tier alone below the full one.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_writable,
    help="Write all figures to this file.",
)
def bench(
    address: str | None,
    models: tuple[str, ...],
    concurrency: tuple[int, ...],
    prompts: Path | None,
    max_tokens: int,
    temperature: float,
    rounds: int,
    pairs: bool,
    json_path: Path | None,
) -> None:
    """Load a server with the cascade and the full model alone in alternation, and compare them.

    Every mode warms up, then takes its turn on every batch of prompts. A prompt is a user's turn in the model's chat template,
    if it has one; of prompts with several turns the first is sent. Ends with status 1 if a request failed.

    \b
    cascade bench --address 127.0.0.1:9000 --concurrency 1,4,16 --json bench.json
    cascade bench --prompts question.jsonl --temperature 0.7
    """
    if address and models:
        raise click.UsageError("--address names a server and --model models that run here: give one of them")
    chosen = read_prompts(prompts) if prompts else BUILT_IN
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)

    async def measure() -> tuple[Backend, list[Cell]]:
        async with asked(address, models) as backend:
            workload = Workload(modes(backend.names, pairs), chosen, concurrency, params, rounds)
            return backend, await measured(backend.stream, workload)

    backend, cells = asyncio.run(measure())
    show(cells)
    if json_path is not None:
        about = {
            "address": address,
            "model": backend.model,
            "processor": _processor() if backend.device is None else backend.device,
            "chat": backend.chat,
            "categories": tuple(dict.fromkeys(prompt.category for prompt in chosen)),
            "version": version("cascade-serve"),
            "date": datetime.now(UTC).date().isoformat(),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "rounds": rounds,
            "prompts": len(chosen),
            "prompts_of": prompts.name if prompts else None,
        }
        json_path.write_text(json.dumps(report.document(cells, **about), indent=1) + "\n", encoding="utf-8")
    if any(cell.errors for cell in cells):
        raise click.exceptions.Exit(1)


def _processor() -> str:
    """This machine's."""
    from cascade.engine.devices import processor  # with PyTorch

    return f"{processor()}, {os.cpu_count()} cores"


def modes(names: tuple[str, ...], pairs: bool) -> tuple[Mode, ...]:
    """Modes for tiers ``names``, bottom to top: the full model alone, the cascade as it chooses, ``pairs``, all tiers."""
    *lower, full = names
    if not lower:
        return (Mode("full alone", Speculation("off")),)
    chains = [(name,) for name in lower if pairs and len(lower) > 1] + [tuple(lower)]
    named = (Mode(" → ".join((*chain, full)), Speculation(tiers=chain)) for chain in chains)
    return (Mode("full alone", Speculation("off")), Mode("cascade", Speculation()), *named)


def show(cells: list[Cell]) -> None:
    """Print all categories together, and whether texts are the same in all modes."""
    whole = joined(cells)
    _print(whole)
    console.print()
    console.print(report.waits(whole))
    console.print(acceptance(whole[-1].edges))
    console.print("All modes gave the same text." if same_text(cells) else "[bold red]The modes gave different texts.[/]")
    for error in sorted({error for cell in cells for error in cell.errors}):
        console.print("[bold red]Failed:[/]", end=" ")
        console.print(error, markup=False)


def _print(cells: Sequence[Cell]) -> None:
    for cell in cells:
        console.print(report.line(cell, cells), markup=False, soft_wrap=True)


async def measured(stream: AsyncStream, workload: Workload) -> list[Cell]:
    """The cells of ``workload``, which are printed as they are done."""
    console.print(report.headline(), style="bold")
    columns = (TextColumn("Measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=workload.num_requests)
        return await load(stream, workload, lambda: progress.advance(task), _print)
