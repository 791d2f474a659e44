"""`cascade distill`, which makes a draft model, and commands for drafters that learn while they serve."""

import os
import time
from pathlib import Path
from typing import Any

import click

from cascade.cli.options import FILE, Finite
from cascade.cli.screen import console
from cascade.errors import ConfigError

THERE = click.Path(exists=True, file_okay=False, path_type=Path)
FOLDER = click.option("--folder", required=True, type=THERE, help="Folder in `alignment.folder`.")
DEVICE = click.option("--device", help="Such as cuda:0; by default the GPU if there is one.")
KEY_ENV = click.option("--key-env", help="Environment variable with the key for encrypted answers.")


@click.command()
@click.option("--model", required=True, help="Path or hub id of the model to draft for.")
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, resolve_path=True, path_type=Path), help="Folder for the result."
)
@click.option(
    "--cost",
    type=Finite(0, 1, min_open=True, max_open=True),
    help="Largest share of the model's weights that a pass of the result reads, such as 0.1.",
)
@click.option("--layers", help="In place of --cost: layers to keep, such as 0-11,20-31.")
@click.option("--start", type=THERE, help="In place of --cost: an earlier result to continue with.")
@click.option("--data", multiple=True, type=FILE, help="Text to learn from; repeat. By default MODEL writes it.")
@click.option("--prompts", type=FILE, help="Prompts for MODEL in place of its own: one a line, text or JSON as in Spec-Bench.")
@click.option("--hours", type=Finite(0, min_open=True), default=8.0, show_default=True, help="Time for the whole run.")
@click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), help="Folder for text and checkpoints; OUT.work by default."
)
@click.option("--rows", type=click.IntRange(1), default=128, show_default=True, help="Texts that are written at the same time.")
@click.option("--max-len", type=click.IntRange(64), default=512, show_default=True, help="Tokens of a text at most.")
@DEVICE
def distill(model: str, out: Path, layers: str | None, work: Path | None, device: str | None, **options: Any) -> None:
    """Cut a draft model out of MODEL, and train it on text that MODEL writes, so that both agree as often as possible.

    An interrupted run continues from its last checkpoint. Draft models of the same MODEL share text if they share --work.

    \b
    cascade distill --model HuggingFaceTB/SmolLM2-1.7B-Instruct --out tiny --cost 0.1
    """
    from cascade.engine.layers import numbers
    from cascade.training import recipe

    plan = recipe.Plan(layers=() if layers is None else numbers(layers), **options)
    run = recipe.Distillation(model, out, plan, work=work or out.with_name(out.name + ".work"), device=device)
    last = 0.0
    with console.status("") as status:

        def tell(now: recipe.Progress) -> None:
            nonlocal last
            agreement = "" if now.agreement is None else f", agreement {now.agreement:.3f}"
            line = f"{now.share:4.0%} {now.phase}: {now.tokens:,} tokens{agreement}"
            status.update(line)
            if time.monotonic() - last > 60:
                console.print(line)
                last = time.monotonic()

        agreement = run.run(tell)
    shown = ", ".join(f"{share:.3f} at temperature {temperature:g}" for temperature, share in agreement.items())
    console.print(f"{out} agrees with {model} at this share of held-out positions: {shown}.")


@click.command()
@FOLDER
@click.option("--tier", "student", required=True, help="The lower tier that learns.")
@click.option("--config", type=FILE, help="The server's configuration; by default the demonstration's.")
@click.option("--seconds", default=300.0, show_default=True, type=Finite(0, min_open=True), help="Training time.")
@KEY_ENV
@DEVICE
def align(folder: Path, student: str, config: Path | None, seconds: float, key_env: str | None, device: str | None) -> None:
    """Let a drafter learn from answers that a server has kept on disk.

    If the new weights are no worse on held-out answers, they become the latest in the folder. A running server takes them.

    \b
    cascade align --folder /shared/cascade --tier tiny --config my.yaml
    """
    from cascade.settings.config import CascadeConfig
    from cascade.settings.llm_configs import load_config
    from cascade.training.alignment import Lesson

    served = CascadeConfig.demo() if config is None else load_config(config)
    settings = {"folder": str(folder), "students": [*{*served.students, student}], "on_disk": True, "key_env": key_env}
    values = served.model_dump(mode="json")
    whole = CascadeConfig.parse(values | {"alignment": (values["alignment"] or {}) | settings})
    assert whole.alignment is not None
    answers, versions = whole.alignment.reservoir(), whole.alignment.versions(student)
    if not len(answers):
        raise ConfigError(f"There are no answers in {folder}: set alignment.on_disk to true where the server runs")
    lesson = Lesson(student, *whole.lesson(student), answers.newest, answers.older, seconds, versions.folder)
    with console.status("") as shown:
        outcome = lesson.run(device, lambda now: shown.update(f"{student}: {now.share:.0%} of the time, step {now.steps}"))
    console.print(f"{outcome}.")
    if not outcome.problem:
        console.print(f"Its latest weights are {versions.current}.", soft_wrap=True)


@click.command()
@click.argument("drafter")
@FOLDER
def rollback(drafter: str, folder: Path) -> None:
    """Let DRAFTER, a tier that learns, return to the weights before the latest ones; a running server does so in seconds."""
    from cascade.training.versions import Versions

    if not (folder / drafter).is_dir():
        raise ConfigError(f"{drafter} has no weights in {folder}: it never learned there")
    version = Versions(folder / drafter).rollback()
    console.print(f"{drafter} returns to {version or 'its original weights'}.", soft_wrap=True)


@click.command()
@click.argument("tenant")
@FOLDER
@KEY_ENV
def forget(tenant: str, folder: Path, key_env: str | None) -> None:
    """Drop the answers of the key named TENANT from those that drafters learn from, on disk and within a minute in a server."""
    from cascade.training import reservoir

    reservoir.forget(folder, tenant)
    reservoir.Reservoir(folder, os.environ.get(key_env or ""))  # rewrites the file on disk without these answers
    console.print(f"Answers of {tenant} are dropped.")
