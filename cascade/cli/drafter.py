"""`cascade drafter`: drafters that read a model, trained for it."""

from pathlib import Path

import click

from cascade.cli.screen import console


@click.group()
def drafter() -> None:
    """Drafters that read a model: train one for yours."""


@drafter.command()
@click.option("--model", required=True, help="Path or hub id of the model that it shall draft for.")
@click.option(
    "--data", multiple=True, type=click.Path(path_type=Path), help="Text like its own; repeat. It writes some if none."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("drafter"), show_default=True, help="Its folder.")
@click.option("--steps", default=1000, show_default=True, type=click.IntRange(min=1), help="Of training.")
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(min=1), help="Rows of a step.")
@click.option("--context", default=128, show_default=True, type=click.IntRange(min=16), help="Tokens of a row.")
@click.option("--vocab-size", default=32_768, show_default=True, type=click.IntRange(min=2), help="Tokens it knows at most.")
@click.option("--device", help="Such as cuda:0. The GPU if there is one.")
def train(
    model: str,
    data: tuple[Path, ...],
    out: Path,
    steps: int,
    batch_size: int,
    context: int,
    vocab_size: int,
    device: str | None,
) -> None:
    """Train an EAGLE-3 head on texts and the model's own hidden states; goes on where it was interrupted."""
    from cascade.training.heads import Plan, train

    loss = train(model, data, out, Plan(steps, batch_size, context, vocab_size), device=device)
    console.print(f"Trained, at {loss:.2f} nats a guess. Serve it with [bold]drafter: {{kind: eagle3, source: {out}}}[/].")
