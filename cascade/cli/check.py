"""`cascade check`: what a configuration needs, and whether its tiers fit together."""

from typing import Any

import click

from cascade.cli import screen
from cascade.cli.config import configured, model_options
from cascade.cli.screen import console
from cascade.errors import ConfigError


@click.command()
@model_options
def check(**models: Any) -> None:
    """Say what the tiers of MODEL need and whether they fit together, without loading a weight.

    MODEL is as `cascade serve` has it, or a file for `serve deploy`. Ends with status 1 and a sentence if they do not fit.
    """
    from cascade.settings.check import needs, remarks, unpinned, verify
    from deployments.app import build

    parsed = configured(**models, deployed=True)
    with console.status("Reading configurations"):
        found = needs(parsed)
    console.print(screen.needs(found))
    verify(parsed)
    build(parsed.model_copy(update={"verify": False}))  # whether Ray Serve takes the options of deployments
    problem = next((need.problem for need in found if need.problem), None)
    if problem:
        raise ConfigError(problem)
    for remark in filter(None, [unpinned(parsed), *remarks(found)]):
        console.print(remark)
    console.print("The tiers fit together.")
