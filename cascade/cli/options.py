"""Options that several commands have."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from cascade.params import SamplingParams, Speculation, Structured

Command = TypeVar("Command", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """Numbers of a range. "nan", which click takes for one of any range, is none, nor is "inf"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a number.", param, ctx)


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)  # to read
DRAFT = click.option("--draft", "drafts", multiple=True, metavar="MODEL", help="A smaller model; repeat, the largest first.")
MODELS = "the model's"  # the default from the model's generation config
OPTIONS = (
    click.option("--max-tokens", type=int, help="Output tokens at most; by default the model's, else 128."),
    click.option("--temperature", "-t", type=float, show_default=MODELS, help="0 is greedy."),
    click.option("--top-k", type=int, show_default=MODELS, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, show_default=MODELS, help="Keep the likeliest tokens with this probability."),
    click.option("--min-p", type=float, show_default=MODELS, help="Keep tokens this likely relative to the likeliest."),
    click.option("--seed", type=int, help="Same seed, same text. Random if not given."),
    click.option("--stop", multiple=True, help="End the text before this string. May be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Continue after the model's end-of-text token."),
    click.option("--presence-penalty", default=0.0, show_default=True, help="Subtracted from logits of tokens in the output."),
    click.option("--frequency-penalty", default=0.0, show_default=True, help="The same, once for each occurrence."),
    click.option("--repetition-penalty", type=float, show_default=MODELS, help="Divides logits of tokens that came before."),
    click.option("--json-schema", metavar="SCHEMA", help="The text is JSON of this schema; @FILE reads it from a file."),
    click.option("--regex", metavar="REGEX", help="The text matches this expression as a whole."),
    click.option("--mode", type=click.Choice(["auto", "off"]), default="auto", help="off: the full model alone."),
    click.option("--tiers", help="Lower tiers and drafters to use, with commas between; by default those that pay."),
)


def counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Parse numbers of requests at once; drops repeated ones."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise click.BadParameter(f"{value!r} must be numbers from 1 to 10000 with commas between them, such as 1,4,16")
    return tuple(dict.fromkeys(map(int, parts)))


def adding(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """A decorator that gives a command these arguments and options, as click's own do one by one."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


sampling_options = adding(OPTIONS)  # `parameters` turns their values into `SamplingParams` and `Speculation`


def parameters(options: dict[str, Any]) -> tuple[Callable[[SamplingParams], SamplingParams], Speculation]:
    """Sampling parameters, as a function of the model's defaults, and speculation, from the values of `OPTIONS` by name."""
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
