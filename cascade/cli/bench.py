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
from cascade.bench.load import AsyncStream, Cell, Plan, load, same_text
from cascade.bench.measure import Mode
from cascade.bench.prompts import BUILT_IN, read_prompts
from cascade.cli.screen import console
from cascade.params import SamplingParams, Speculation

PICTURES = (".svg", ".png")


def _counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise click.BadParameter(f"{value!r} must be numbers from 1 to 10000 with commas between them, such as 1,4,16")
    return tuple(dict.fromkeys(map(int, parts)))


def _picture(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refused now, not after minutes of measuring."""
    if value is not None and value.suffix not in PICTURES:
        raise click.BadParameter(f"{value} must end with {' or '.join(PICTURES)}")
    if value is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("pictures need matplotlib: pip install 'cascade-serve[bench]'")
    return value


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} is no folder: make it first")
    return value


@click.command()
@click.option("--address", help="Of a server, such as 127.0.0.1:9000. Without one the embedded family runs in this process.")
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
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), callback=_writable, help="Write all here."
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=lambda c, p, v: _writable(c, p, _picture(c, p, v)),
    help="Draw it as .svg or .png.",
)
def bench(
    address: str | None,
    concurrency: tuple[int, ...],
    prompts: Path | None,
    only: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    rounds: int,
    pairs: bool,
    json_path: Path | None,
    picture: Path | None,
) -> None:
    """Load a server with the cascade and the full model alone in alternation, and compare them.

    Every mode warms up, then takes its turn on every batch of prompts. Ends with status 1 if a request failed.

    \b
    cascade bench --address 127.0.0.1:9000 --concurrency 1,4,16 --picture bench.svg
    """
    asked = read_prompts(prompts) if prompts else BUILT_IN
    if unknown := set(only) - {prompt.category for prompt in asked}:
        known = ", ".join(dict.fromkeys(prompt.category for prompt in asked))
        raise click.BadParameter(f"{min(unknown)!r} is no category of the prompts: they have {known}", param_hint="--category")
    chosen = tuple(prompt for prompt in asked if not only or prompt.category in only)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    plan, cells = asyncio.run(_measure(address, lambda names: Plan(modes(names, pairs), chosen, concurrency, params, rounds)))
    show(cells)
    if json_path is not None:
        about: dict[str, Any] = {
            "version": version("cascade-serve"),
            "address": address,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        about |= {"rounds": rounds, "prompts": len(chosen), "categories": plan.categories}
        json_path.write_text(json.dumps(report.document(cells, **about), indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        from cascade.bench.picture import draw

        draw(cells, picture)
    if any(cell.errors for cell in cells):
        raise click.exceptions.Exit(1)


def modes(names: tuple[str, ...], pairs: bool) -> tuple[Mode, ...]:
    """The full model alone, the cascade of ``names`` as it chooses its tiers, each pair if asked for, and all tiers."""
    *lower, full = names
    chains = [(name,) for name in lower if pairs and len(lower) > 1] + ([tuple(lower)] if lower else [])
    first = [Mode("full alone", Speculation("off"))] + ([Mode("cascade", Speculation())] if lower else [])
    return (*first, *(Mode(" → ".join((*chain, full)), Speculation(tiers=chain)) for chain in chains))


def show(cells: list[Cell]) -> None:
    """Print the tables, and what went wrong."""
    console.print(report.speeds(cells))
    console.print(report.categories(cells))
    console.print("All modes gave the same text." if same_text(cells) else "[bold red]The modes gave different texts.[/]")
    for error in sorted({error for cell in cells for error in cell.errors}):
        console.print("[bold red]Failed:[/]", end=" ")
        console.print(error, markup=False)


async def _measure(address: str | None, plan: Callable[[tuple[str, ...]], Plan]) -> tuple[Plan, list[Cell]]:
    columns = (TextColumn("Measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    async with _connected(address) as (stream, names):
        made = plan(names)
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=made.num_requests)
            return made, await load(stream, made, step=lambda: progress.advance(task))


@asynccontextmanager
async def _connected(address: str | None) -> AsyncIterator[tuple[AsyncStream, tuple[str, ...]]]:
    """A stream function and the names of the tiers: of a server, or of the embedded family in this process."""
    if address is not None:
        from cascade.client import AsyncClient

        async with AsyncClient(address, api_key=os.environ.get("CASCADE_API_KEY")) as client:
            yield client.stream, tuple(tier.name for tier in (await client.describe()).tiers)
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the embedded models load in no time
    from cascade.local import Cascade

    with Cascade.demo() as cascade:
        yield cascade.astream, cascade.names
