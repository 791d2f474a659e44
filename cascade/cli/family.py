"""`cascade family`: the embedded models, trained again and judged."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torch import Tensor

HEAD_TOKENS = 3072  # that the drafter knows: 97.6 % of the text


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


@family.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path(".family/head"), show_default=True, help="Checkpoints.")
@click.option("--steps", default=1800, show_default=True, type=click.IntRange(min=1), help="Of training.")
@click.option("--device", default="cpu", show_default=True, help="Such as cuda.")
def head(work: Path, steps: int, device: str) -> None:
    """Train the drafter that reads the full model, on the source of the standard library; goes on where it was interrupted."""
    import numpy as np

    from cascade.engine.heads.eagle_training import Shape, train_eagle3
    from cascade.engine.heads.training import Schedule
    from cascade.engine.loading import load
    from cascade.engine.tokenizer import Tokenizer
    from cascade.family import corpus, paths
    from cascade.family import train as models

    full = paths()[-1]
    network = load(full, dtype="float32", device=device).requires_grad_(False)
    network.set_attn_implementation(models.CAUSAL)
    stream = corpus.encode(Tokenizer.from_pretrained(full).backend, corpus.source_files("train"))
    known = np.argsort(-np.bincount(stream, minlength=network.config.vocab_size), kind="stable")[:HEAD_TOKENS]
    shape = Shape(num_heads=12, num_kv_heads=4, intermediate_size=512, reads=(2, 4, 6), tokens=tuple(sorted(known.tolist())))
    schedule = Schedule(steps, unrolled=3, muon_lr=0.02, adam_lr=2e-3, warmup_steps=10, save_every=20)

    def batch(step: int) -> "Tensor":
        rows = models.Schedule(steps=step + 1, batch_size=6, context=129)
        return next(models.batches(stream, rows, step))[:, :-1]

    click.echo(json.dumps({"loss": train_eagle3(network, batch, shape, schedule, work)}))
