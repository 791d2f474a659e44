"""`cascade family`: the embedded models, trained again and judged."""

import json
from pathlib import Path

import click


@click.group()
def family() -> None:
    """The embedded models: train them again, or judge how well they predict and agree."""


@family.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path(".family"), show_default=True, help="Checkpoints.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("family"), show_default=True, help="The models.")
@click.option("--device", default="cpu", show_default=True, help="Such as cuda.")
@click.option("--threads", type=int, help="CPU threads. All cores if not given.")
@click.option("--compiled/--plain", default=True, help="Compile the training step: a fifth faster, needs a C++ compiler.")
def train(work: Path, out: Path, device: str, threads: int | None, compiled: bool) -> None:
    """Run the recipe on the source of the standard library; goes on where it was interrupted. Hours on a CPU."""
    from cascade.family.recipe import train_family

    click.echo(json.dumps(train_family(work, out, device=device, threads=threads, compiled=compiled), indent=2))


@family.command()
@click.option("--models", type=click.Path(exists=True, path_type=Path), help="Folder of tiny, medium, full. The embedded ones.")
@click.option("--device", default="cpu", show_default=True, help="Such as cuda.")
def judge(models: Path | None, device: str) -> None:
    """Loss on held-out files, agreement and acceptance of each edge, as JSON. Minutes on a CPU."""
    from cascade.family import WEIGHTS
    from cascade.family.evaluate import evaluate_family

    click.echo(json.dumps(evaluate_family(models or WEIGHTS, device=device), indent=2))
