"""`cascade bench`: the cascade beside the full model alone, under load."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cascade.bench import report
from cascade.bench.load import AsyncStream, Cell, Workload, load, same_text
from cascade.bench.measure import EdgeTotals, Mode
from cascade.bench.prompts import BUILT_IN, Prompt, read_prompts
from cascade.cli.screen import acceptance, console
from cascade.params import MAX_BRANCHES, SamplingParams, Speculation

PICTURES = (".svg", ".png")
NEW_FILE = click.Path(dir_okay=False, path_type=Path)


def _counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """The numbers of requests at once, each once."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise click.BadParameter(f"{value!r} must be numbers from 1 to 10000 with commas between them, such as 1,4,16")
    return tuple(dict.fromkeys(map(int, parts)))


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuses a file without a folder now, not after minutes of measuring."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} is no folder: make it first")
    return value


def _drawable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuses a picture that cannot be drawn now, not after minutes of measuring."""
    if value is not None and value.suffix not in PICTURES:
        raise click.BadParameter(f"{value} must end with {' or '.join(PICTURES)}")
    if value is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("pictures need matplotlib: pip install 'cascade-serve[bench]'")
    return _writable(context, parameter, value)


@click.command()
@click.option("--address", help="Of a server, such as 127.0.0.1:9000. Without one the demonstration family runs here.")
@click.option("--concurrency", default="1", show_default=True, callback=_counts, help="Requests at once; such as 1,4,16.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file, one a line: text, or JSON with prompt and category. Built-in ones of four categories if not given.",
)
@click.option("--category", "only", multiple=True, help="Only prompts of this category. May be repeated.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Output tokens at most.")
@click.option("--temperature", "-t", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Times each prompt is sent in each mode.")
@click.option("--pairs", is_flag=True, help="Also measure each lower tier alone below the full one.")
@click.option("--branches", type=click.IntRange(0, MAX_BRANCHES), help="Ways beside its text that a tier may prepare; 0: none.")
@click.option("--json", "json_path", type=NEW_FILE, callback=_writable, help="Write all figures to this file.")
@click.option("--picture", type=NEW_FILE, callback=_drawable, help="Draw them into this .svg or .png file.")
def bench(
    address: str | None,
    concurrency: tuple[int, ...],
    prompts: Path | None,
    only: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    rounds: int,
    pairs: bool,
    branches: int | None,
    json_path: Path | None,
    picture: Path | None,
) -> None:
    """Load a server with the cascade and the full model alone in alternation, and compare them.

    Every mode warms up, then takes its turn on every batch of prompts. Ends with status 1 if a request failed.

    \b
    cascade bench --address 127.0.0.1:9000 --concurrency 1,4,16 --picture bench.svg
    """
    chosen = _of_categories(read_prompts(prompts) if prompts else BUILT_IN, only)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    workload, cells = asyncio.run(
        _measure(address, lambda names: Workload(modes(names, pairs, branches), chosen, concurrency, params, rounds))
    )
    show(cells)
    if json_path is not None:
        whole = report.document(cells, version=version("cascade-serve"), address=address, **_about(workload))
        json_path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        from cascade.bench.picture import draw  # needs matplotlib, which is optional

        draw(cells, picture)
    if any(cell.errors for cell in cells):
        raise click.exceptions.Exit(1)


def _of_categories(prompts: tuple[Prompt, ...], only: tuple[str, ...]) -> tuple[Prompt, ...]:
    """The prompts of the categories ``only``, or all if there are none."""
    known = tuple(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := set(only) - set(known):
        sentence = f"{min(unknown)!r} is no category of the prompts: they have {', '.join(known)}"
        raise click.BadParameter(sentence, param_hint="--category")
    return tuple(prompt for prompt in prompts if not only or prompt.category in only)


def _about(workload: Workload) -> dict[str, Any]:
    """What the document says of the workload."""
    return {
        "max_tokens": workload.params.max_tokens,
        "temperature": workload.params.temperature,
        "rounds": workload.rounds,
        "prompts": len(workload.prompts),
        "categories": workload.categories,
    }


def modes(names: tuple[str, ...], pairs: bool, branches: int | None = None) -> tuple[Mode, ...]:
    """Modes for tiers ``names``, bottom to top: the full model alone, the cascade as it chooses, ``pairs``, all tiers."""
    *lower, full = names
    chains = [(name,) for name in lower if pairs and len(lower) > 1] + ([tuple(lower)] if lower else [])
    first = [Mode("full alone", Speculation("off"))] + ([Mode("cascade", Speculation(branches=branches))] if lower else [])
    named = (Mode(" → ".join((*chain, full)), Speculation(tiers=chain, branches=branches)) for chain in chains)
    return (*first, *named)


def show(cells: list[Cell]) -> None:
    """Print the tables, and what went wrong."""
    console.print(report.speeds(cells))
    console.print(report.categories(cells))
    totals = EdgeTotals()
    for cell in cells:
        totals.add(cell.edges.values() if cell.mode == cells[-1].mode else ())
    console.print(acceptance(totals.values()))
    console.print("All modes gave the same text." if same_text(cells) else "[bold red]The modes gave different texts.[/]")
    for error in sorted({error for cell in cells for error in cell.errors}):
        console.print("[bold red]Failed:[/]", end=" ")
        console.print(error, markup=False)


async def _measure(address: str | None, workload_for: Callable[[tuple[str, ...]], Workload]) -> tuple[Workload, list[Cell]]:
    """The workload for the tiers that are there, and its cells."""
    columns = (TextColumn("Measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    async with _connected(address) as (stream, names):
        workload = workload_for(names)
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=workload.num_requests)
            return workload, await load(stream, workload, step=lambda: progress.advance(task))


@asynccontextmanager
async def _connected(address: str | None) -> AsyncIterator[tuple[AsyncStream, tuple[str, ...]]]:
    """A stream function and the names of the tiers: of a server, or of the demonstration family here."""
    if address is not None:
        from cascade.client import AsyncClient

        async with AsyncClient(address, api_key=os.environ.get("CASCADE_API_KEY")) as client:
            served = await client.describe()
            yield client.stream, (*served.drafters, *(tier.name for tier in served.tiers))
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # these models load in no time
    from cascade.local import Cascade

    with Cascade.demo() as cascade:
        yield cascade.astream, cascade.names
