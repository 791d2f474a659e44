"""`cascade bench`: the cascade beside the full model alone, under load."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cascade.answer import Chunk
from cascade.bench import report
from cascade.bench.load import AsyncStream, Cell, EdgeTotals, Mode, Workload, joined, load, same_text
from cascade.bench.prompts import BUILT_IN, Prompt, read_prompts
from cascade.cli.connection import Here, Served, asking, loaded
from cascade.cli.options import named_models
from cascade.cli.screen import acceptance, console
from cascade.params import MAX_BRANCHES, Handling, SamplingParams, Speculation

if TYPE_CHECKING:  # it needs gRPC, which starts slowly
    from cascade.client.chat import TurnPiece

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


@click.command()
@click.option("--address", help="Of a server, such as 127.0.0.1:9000. Without one the models run here.")
@named_models
@click.option("--concurrency", default="1", show_default=True, callback=_counts, help="Requests at once; such as 1,4,16.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file, one a line: text, or JSON as in Spec-Bench, HumanEval or GSM8K. Six kinds of eight if not given.",
)
@click.option("--raw", is_flag=True, help="Go on with prompts as they are, also if the model has a chat template.")
@click.option("--category", "only", multiple=True, help="Only prompts of this category. May be repeated.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Output tokens at most.")
@click.option("--temperature", "-t", default=0.0, show_default=True, help="0 is greedy, as runs that compare are; 1 elsewhere.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Times each prompt is sent in each mode.")
@click.option("--pairs", is_flag=True, help="Also measure each lower tier alone below the full one.")
@click.option(
    "--branches", type=click.IntRange(0, MAX_BRANCHES), help="Branches beside its text that a tier may write; 0: none."
)
@click.option("--json", "json_path", type=NEW_FILE, callback=_writable, help="Write all figures to this file.")
def bench(
    address: str | None,
    models: tuple[str, ...],
    concurrency: tuple[int, ...],
    prompts: Path | None,
    raw: bool,
    only: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    rounds: int,
    pairs: bool,
    branches: int | None,
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
    chosen = _of_categories(read_prompts(prompts) if prompts else BUILT_IN, only)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    workload, about, cells = asyncio.run(
        _measure(
            _connected(address, models, raw),
            lambda names: Workload(modes(names, pairs, branches), chosen, concurrency, params, rounds),
        )
    )
    show(cells)
    if json_path is not None:
        whole = report.document(cells, **about, **_about(workload, prompts))
        json_path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if any(cell.errors for cell in cells):
        raise click.exceptions.Exit(1)


def _of_categories(prompts: tuple[Prompt, ...], only: tuple[str, ...]) -> tuple[Prompt, ...]:
    """The prompts of the categories ``only``, or all if there are none."""
    known = tuple(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := set(only) - set(known):
        sentence = f"{min(unknown)!r} is no category of the prompts: they have {', '.join(known)}"
        raise click.BadParameter(sentence, param_hint="--category")
    return tuple(prompt for prompt in prompts if not only or prompt.category in only)


def _about(workload: Workload, prompts: Path | None) -> dict[str, Any]:
    return {
        "version": version("cascade-serve"),
        "date": datetime.now(UTC).date().isoformat(),
        "max_tokens": workload.params.max_tokens,
        "temperature": workload.params.temperature,
        "rounds": workload.rounds,
        "prompts": len(workload.prompts),
        "prompts_of": prompts.name if prompts else None,
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
    _print(joined(cells))
    console.print()
    console.print(report.waits(cells))
    console.print(report.categories(cells))
    totals = EdgeTotals()
    for cell in cells:
        totals.add(cell.edges.values() if cell.mode == cells[-1].mode else ())
    console.print(acceptance(totals.values()))
    console.print("All modes gave the same text." if same_text(cells) else "[bold red]The modes gave different texts.[/]")
    for error in sorted({error for cell in cells for error in cell.errors}):
        console.print("[bold red]Failed:[/]", end=" ")
        console.print(error, markup=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """Who answers: how, with which tiers, bottom to top, and what the document says of it."""

    stream: AsyncStream
    names: tuple[str, ...]
    about: dict[str, Any]


async def _measure(
    connected: AbstractAsyncContextManager[Asked], workload_for: Callable[[tuple[str, ...]], Workload]
) -> tuple[Workload, dict[str, Any], list[Cell]]:
    """The workload for the tiers that are there, what is said of these, and the cells, which are printed as they are done."""
    columns = (TextColumn("Measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    async with connected as asked:
        workload = workload_for(asked.names)
        console.print(report.headline(), style="bold")
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=workload.num_requests)
            cells = await load(asked.stream, workload, lambda: progress.advance(task), _print)
            return workload, asked.about, cells


def _print(cells: Sequence[Cell]) -> None:
    """The cells of a category that is done, or of all of them."""
    for cell in cells:
        console.print(report.line(cell, cells), markup=False, soft_wrap=True)


@asynccontextmanager
async def _connected(address: str | None, models: tuple[str, ...], raw: bool) -> AsyncIterator[Asked]:
    """A server, or models that run here; prompts are turns of a user unless they are ``raw`` or there is no template."""
    if address is None:
        with loaded(models) as cascade:
            here = Here(cascade)
            chat = not raw and here.has_template()

            def ask(prompt: str, *how: Any) -> AsyncIterator[Chunk]:
                return cascade.astream(here.encode(asking(prompt)), *how)

            model = Path(cascade.tokenizer.backend.name_or_path).name
            about = {"address": None, "model": model, "processor": _processor(), "chat": chat}
            yield Asked(ask if chat else cascade.astream, cascade.names, about)
        return
    from cascade.client import AsyncClient, Client

    with Client(address) as client:
        served = Served(client)
        chat = not raw and served.has_template()
    full = served.info.tiers[-1]
    near = address.rpartition("/")[2].startswith(("127.0.0.1:", "localhost:", "[::1]:"))
    about = {"address": address, "model": full.model, "processor": _processor() if near else full.device, "chat": chat}
    async with AsyncClient(address) as talking:

        async def say(
            prompt: str, params: SamplingParams, speculation: Speculation, handling: Handling
        ) -> AsyncGenerator[Chunk, None]:
            said = talking.stream_chat(asking(prompt), params, speculation, handling)
            async with aclosing(cast("AsyncGenerator[TurnPiece, None]", said)) as pieces:
                async for piece in pieces:
                    yield piece.chunk

        yield Asked(say if chat else talking.stream, served.names, about)


def _processor() -> str:
    """Of this machine, and how many of its cores this program may use."""
    from cascade.engine.devices import processor  # with PyTorch

    return f"{processor()}, {os.cpu_count()} cores"
