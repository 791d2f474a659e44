"""`cascade drafter`: drafters that read a model, trained for it. `cascade align`, `rollback`, `forget`: drafters that learn."""

import os
from pathlib import Path

import click

from cascade.cli.screen import console
from cascade.errors import ConfigError

FOLDER = click.option(
    "--folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="That of `alignment.folder`."
)
KEY_ENV = click.option("--key-env", help="Environment variable with the key of encrypted answers.")


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
    use = f"[bold]drafter: {{kind: eagle3, source: {out}}}[/]"
    console.print(f"Trained, at {loss:.2f} nats a guess. Serve it with {use}.", soft_wrap=True)


@click.command()
@click.option(
    "--from", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder with answers of a server."
)
@click.option("--tier", "student", required=True, help="Lower tier that learns, or eagle3 for the head of the full tier.")
@click.option("--config", type=click.Path(path_type=Path), help="The server's configuration. The demonstration if not given.")
@click.option("--seconds", default=300.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Of training.")
@KEY_ENV
@click.option("--device", help="Such as cuda:0. The GPU if there is one.")
def align(folder: Path, student: str, config: Path | None, seconds: float, key_env: str | None, device: str | None) -> None:
    """Let a drafter learn from answers that a server has kept on disk.

    Weights that are no worse on answers that were held out become the latest in the folder, which a running server takes.

    \b
    cascade align --from /shared/cascade --tier tiny --config my.yaml
    """
    from cascade.settings.config import CascadeConfig
    from cascade.training import alignment

    values = (CascadeConfig.demo() if config is None else CascadeConfig.load(config, deployed=True)).model_dump(mode="json")
    asked = {"folder": str(folder), "students": [student], "on_disk": True, "key_env": key_env}
    whole = CascadeConfig.parse(values | {"alignment": (values["alignment"] or {}) | asked})
    assert whole.alignment is not None
    answers, versions = whole.alignment.reservoir(), whole.alignment.versions(student)
    if not len(answers):
        raise ConfigError(f"There are no answers in {folder}: set alignment.on_disk to true where the server runs")
    learner = alignment.student_of(student, *whole.lesson(student), device=device)
    with console.status("") as shown:
        outcome = alignment.align(
            student,
            learner,
            answers.newest,
            answers.older,
            seconds,
            tell=lambda now: shown.update(f"{student}: {now.share:.0%} of the time, step {now.steps}"),
        )
    console.print(f"{outcome}.")
    if not outcome.problem:
        version = versions.add(alignment.record(learner, outcome))
        versions.choose(version)
        console.print(f"Its latest weights are {version}.", soft_wrap=True)


@click.command()
@click.argument("student")
@FOLDER
def rollback(student: str, folder: Path) -> None:
    """Let STUDENT, a drafter that learns, go back to the weights before its latest; a running server does so in seconds."""
    from cascade.training.versions import Versions

    if not (folder / student).is_dir():
        raise ConfigError(f"{student} has no weights in {folder}: it never learnt there")
    version = Versions(folder / student).rollback()
    console.print(f"{student} goes back to {version or 'the weights that it began with'}.", soft_wrap=True)


@click.command()
@click.argument("tenant")
@FOLDER
@KEY_ENV
def forget(tenant: str, folder: Path, key_env: str | None) -> None:
    """Drop the answers of the key named TENANT that drafters learn from, on disk and in a running server within a minute."""
    from cascade.training import reservoir

    reservoir.forget(folder, tenant)
    if any((folder / name).exists() for name in (reservoir.ROWS, reservoir.SEALED)):
        limits = reservoir.Limits(rows=10**9, row_tokens=10**9, max_age_s=float("inf"))
        reservoir.Reservoir(limits, folder, os.environ.get(key_env or ""))
    console.print(f"Answers of {tenant} are forgotten.")
