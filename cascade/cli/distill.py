"""`cascade distill`: a smaller model that drafts for one, made from that one itself."""

import time
from pathlib import Path

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cascade.cli.screen import console


@click.command()
@click.option("--model", required=True, help="Path or hub id of the model that it shall draft for.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the result.")
@click.option("--cost", required=True, type=float, help="Share of the model's pass that one of the result takes, such as 0.1.")
@click.option(
    "--data",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text to learn from; repeatable.",
)
@click.option(
    "--start", type=click.Path(exists=True, file_okay=False, path_type=Path), help="An earlier student, to go on with it."
)
@click.option("--hours", type=float, default=8.0, show_default=True, help="Time for all of it; more when called again goes on.")
@click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), help="Folder of text and checkpoints. OUT.work unless given."
)
@click.option("--rows", type=click.IntRange(1), default=128, show_default=True, help="Texts written at a time.")
@click.option("--max-len", type=click.IntRange(64), default=512, show_default=True, help="Tokens of a text at most.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. All cores unless given.")
@click.option("--device", help="Such as cuda:0. The GPU if there is one.")
def distill(
    model: str,
    out: Path,
    cost: float,
    data: tuple[Path, ...],
    start: Path | None,
    hours: float,
    work: Path | None,
    rows: int,
    max_len: int,
    threads: int | None,
    device: str | None,
) -> None:
    """Cut a student out of MODEL, and train it on text that MODEL writes by itself, until it says the same as often as it can.

    It goes on where it was interrupted. Several students of one model share their text when they share --work.

    \b
    cascade distill --model HuggingFaceTB/SmolLM2-1.7B-Instruct --out tiny --cost 0.1
    """
    import torch

    from cascade.training import recipe

    if threads is not None:
        torch.set_num_threads(threads)
    plan = recipe.Plan(cost, hours, max_len, rows)
    work = work or out.with_name(out.name + ".work")
    run = recipe.Distillation(model, out, plan, work=work, data=data, start=start, device=device)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task, last = bar.add_task("", total=1.0), [0.0]

        def tell(now: recipe.Progress) -> None:
            known = "" if now.agreement is None else f", agreement {now.agreement:.3f}"
            line = f"{now.phase}: {now.tokens:,} tokens{known}"
            bar.update(task, completed=now.share, description=line)
            if not console.is_terminal and time.monotonic() - last[0] > 60:
                console.print(f"{now.share:4.0%} {line}")
                last[0] = time.monotonic()

        agreement = run.run(tell)
    shown = ", ".join(f"{share:.3f} at temperature {temperature:g}" for temperature, share in agreement.items())
    console.print(f"{out} says what {model} says at this share of held-out positions: {shown}.")
