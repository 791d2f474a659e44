"""Options that several commands have: those that describe a request, and the models that answer here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from cascade.params import RULES, STRUCTURED_KINDS, SamplingParams, Speculation, Structured

Command = TypeVar("Command", bound=Callable[..., Any])
RULED = ("rule", "draft_top_k")
OPTIONS = (
    click.option("--max-tokens", default=128, show_default=True, help="Output tokens at most."),
    click.option("--temperature", "-t", default=SamplingParams().temperature, show_default=True, help="0 is greedy."),
    click.option("--top-k", default=0, show_default=True, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--top-p", default=1.0, show_default=True, help="Keep the likeliest tokens with this probability."),
    click.option("--min-p", default=0.0, show_default=True, help="Keep tokens this likely relative to the likeliest."),
    click.option("--seed", type=int, help="Same seed, same text. Random if not given."),
    click.option("--stop", multiple=True, help="End the text before this string. May be repeated."),
    click.option("--stop-token", "stop_token_ids", type=int, multiple=True, help="End with this token id. May be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text token."),
    click.option("--min-tokens", default=0, show_default=True, help="Output tokens at least."),
    click.option("--presence-penalty", default=0.0, show_default=True, help="Against tokens that the output has."),
    click.option("--frequency-penalty", default=0.0, show_default=True, help="The same for each time it has them."),
    click.option("--repetition-penalty", default=1.0, show_default=True, help="Divides logits of tokens seen before."),
    click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Added to the logit of a token. May be repeated."),
    click.option("--logprobs", type=int, help="Show log-probabilities, and those of so many likeliest tokens."),
    click.option("--json-schema", metavar="SCHEMA", help="The text is JSON of this schema; @FILE reads it from a file."),
    click.option("--json-object", is_flag=True, help="The text is a JSON object."),
    click.option("--regex", metavar="REGEX", help="The text matches this expression as a whole."),
    click.option("--choice", multiple=True, metavar="TEXT", help="The text is one of these. May be repeated."),
    click.option("--grammar", metavar="GRAMMAR", help="The text is of this Lark or GBNF grammar; @FILE reads it."),
    click.option("--mode", type=click.Choice(["auto", "off"]), default="auto", help="off: the full model alone."),
    click.option("--tiers", help="Lower tiers and drafters to use, with commas between. Those that pay if not given."),
    click.option("--window", type=int, help="Tokens a tier may run ahead of the tier above."),
    click.option("--schedule", type=click.Choice(["async", "lockstep"]), help="async with the coupled rule if not given."),
    click.option("--branches", type=int, help="Branches beside its text that a tier may write; 0: none."),
    click.option(
        "--rule", type=click.Choice(RULES), default="coupled", show_default=True, help="Accepts guesses at the full tier."
    ),
    click.option("--draft-top-k", type=int, help="Guesses of other rules are among so many likeliest tokens; 0: all."),
)


def adding(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """A decorator that gives a command these arguments and options, as click's own do one by one."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


sampling_options = adding(OPTIONS)  # those of `SamplingParams` and `Speculation`, for `parameters` to collect
named_models = click.option(
    "--model",
    "models",
    multiple=True,
    help="A path or hub id, bottom to top; repeat. SmolLM2-135M-Instruct and its tiers if none.",
)


def parameters(options: dict[str, Any]) -> tuple[SamplingParams, Speculation]:
    """What the values of `OPTIONS`, by name, ask for."""
    tiers = options.pop("tiers")
    names = None if tiers is None else tuple(name.strip() for name in tiers.split(",") if name.strip())
    chosen = {name: options.pop(name) for name in ("mode", "window", "schedule", "branches", *RULED)}
    options["logit_bias"] = dict(_bias(pair) for pair in options["logit_bias"])
    kinds = {name: options.pop(name) for name in STRUCTURED_KINDS}
    for name in ("json_schema", "grammar"):
        if kinds[name] and kinds[name].startswith("@"):
            kinds[name] = _read(kinds[name][1:])
    structured = Structured(**kinds) if any(kinds.values()) else None
    return SamplingParams(structured=structured, **options), Speculation(tiers=names, **chosen)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}") from None


def _bias(pair: str) -> tuple[int, float]:
    token, _, bias = pair.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{pair!r} is not ID=BIAS, such as 42=-5", param_hint="--logit-bias") from None
