"""Options that several commands have: those of a request, and the models that answer here."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from cascade.params import SamplingParams, Speculation, Structured

Command = TypeVar("Command", bound=Callable[..., Any])
MODELS = "the model's"  # generation config, as the server or the library has read it
OPTIONS = (
    click.option("--max-tokens", type=int, help="Output tokens at most; by default the model's, else 128."),
    click.option("--temperature", "-t", type=float, show_default=MODELS, help="0 is greedy."),
    click.option("--top-k", type=int, show_default=MODELS, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, show_default=MODELS, help="Keep the likeliest tokens with this probability."),
    click.option("--min-p", type=float, show_default=MODELS, help="Keep tokens this likely relative to the likeliest."),
    click.option("--seed", type=int, help="Same seed, same text. Random if not given."),
    click.option("--stop", multiple=True, help="End the text before this string. May be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text token."),
    click.option("--presence-penalty", default=0.0, show_default=True, help="Against tokens that the output has."),
    click.option("--frequency-penalty", default=0.0, show_default=True, help="The same for each time it has them."),
    click.option("--repetition-penalty", type=float, show_default=MODELS, help="Divides logits of tokens seen before."),
    click.option("--json-schema", metavar="SCHEMA", help="The text is JSON of this schema; @FILE reads it from a file."),
    click.option("--regex", metavar="REGEX", help="The text matches this expression as a whole."),
    click.option("--mode", type=click.Choice(["auto", "off"]), default="auto", help="off: the full model alone."),
    click.option("--tiers", help="Lower tiers and drafters to use, with commas between. Those that pay if not given."),
)


def counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers of requests at once, each once."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise click.BadParameter(f"{value!r} must be numbers from 1 to 10000 with commas between them, such as 1,4,16")
    return tuple(dict.fromkeys(map(int, parts)))


def adding(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """A decorator that gives a command these arguments and options, as click's own do one by one."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


sampling_options = adding(OPTIONS)  # those of `SamplingParams` and `Speculation`, which `parameters` collects


def parameters(options: dict[str, Any]) -> tuple[Callable[[SamplingParams], SamplingParams], Speculation]:
    """What the values of `OPTIONS`, by name, ask for; the sampling parameters given those of the model."""
    tiers, mode = options.pop("tiers"), options.pop("mode")
    names = None if tiers is None else tuple(name.strip() for name in tiers.split(",") if name.strip())
    schema, regex = options.pop("json_schema"), options.pop("regex")
    if schema and schema.startswith("@"):
        try:
            schema = Path(schema[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise click.BadParameter(f"{schema[1:]} cannot be read: {error}", param_hint="--json-schema") from None
    structured = Structured(json_schema=schema, regex=regex) if schema or regex else None
    given = {name: value for name, value in {**options, "structured": structured}.items() if value is not None}
    SamplingParams(**given)  # raises `InvalidRequest` before anything starts
    return partial(replace, **given), Speculation(mode, tiers=names)
