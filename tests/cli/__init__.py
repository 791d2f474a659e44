"""The command line as tests call it."""

from pathlib import Path

from click.testing import CliRunner

from cascade.cli.main import main


def run(*arguments: str | Path, input: str | None = None, **env: str) -> tuple[int, str]:
    """Exit code of `cascade` with these arguments, and what was printed: of a success standard output alone."""
    result = CliRunner(env=env).invoke(main, [str(argument) for argument in arguments], input=input)
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output if result.exit_code else result.stdout
