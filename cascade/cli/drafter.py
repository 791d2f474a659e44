"""`cascade drafter`: drafters that read a model, trained for it."""

from pathlib import Path

import click

from cascade.cli.screen import console


@click.group()
def drafter() -> None:
    """Drafters that read a model: train one for yours."""


@drafter.command()
@click.option(
    "--kind",
    type=click.Choice(["eagle3", "medusa", "dflash", "dspark"]),
    default="eagle3",
    show_default=True,
    help="What is trained.",
)
@click.option("--model", required=True, help="Path or hub id of the model that it shall draft for.")
@click.option(
    "--data", multiple=True, type=click.Path(path_type=Path), help="Text like its own; repeat. It writes some if none."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("drafter"), show_default=True, help="Its folder.")
@click.option("--steps", default=1000, show_default=True, type=click.IntRange(min=1), help="Of training.")
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(min=1), help="Rows of a step.")
@click.option("--context", default=128, show_default=True, type=click.IntRange(min=16), help="Tokens of a row.")
@click.option("--vocab-size", type=click.IntRange(min=2), help="Tokens it knows at most, of eagle3. 32768 if not given.")
@click.option("--num-heads", type=click.IntRange(min=1), help="Guesses, of medusa. 4 if not given.")
@click.option(
    "--block-size", type=click.IntRange(2, 32), help="Of dflash and dspark: the last token and guesses. 8 if not given."
)
@click.option("--device", help="Such as cuda:0. The GPU if there is one.")
def train(
    kind: str,
    model: str,
    data: tuple[Path, ...],
    out: Path,
    steps: int,
    batch_size: int,
    context: int,
    vocab_size: int | None,
    num_heads: int | None,
    block_size: int | None,
    device: str | None,
) -> None:
    """Train a drafter on texts and the model's own hidden states; goes on where it was interrupted."""
    from cascade.training.heads import Plan, train

    plan = Plan(kind, steps, batch_size, context, vocab_size, num_heads, block_size)
    loss = train(model, data, out, plan, device=device)
    console.print(f"Trained, at {loss:.2f} nats a guess. Serve it with [bold]drafter: {{kind: {kind}, source: {out}}}[/].")
