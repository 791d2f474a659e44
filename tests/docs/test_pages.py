"""README and docs: links lead somewhere, code is code, commands exist, figures are those of the documents."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from benchmarks import figures
from cascade.cli.main import main
from cascade.settings.config import CascadeConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)(```|~~~)(\w*)[^\n]*\n(.*?)^\1\2", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    return ((found[3], found[4]) for found in BLOCK.finditer(page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Guards readers against pages and headings that have moved."""
    for target, anchor in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{target} of {page.name}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{target}#{anchor} of {page.name}"


def test_code_is_code() -> None:
    """Guards what readers copy: Python that compiles, tiers that the configuration takes."""
    for page in PAGES:
        for language, text in blocks(page):
            if language == "python":
                ast.parse(text)
            elif language == "yaml":
                for values in yaml.safe_load_all(text):
                    if isinstance(values, dict) and "tiers" in values and "..." not in text:
                        CascadeConfig.parse(values)


def test_commands_exist() -> None:
    """Guards readers against commands and options of `cascade` that are gone."""
    for page in PAGES:
        for language, text in blocks(page):
            if language in ("", "sh", "bash"):
                for line in text.replace("\\\n", " ").splitlines():
                    check(line)


def check(line: str) -> None:
    """That a line which calls `cascade` names a command of it, with options that this has."""
    called = re.match(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?cascade (.*)$", line)
    if called is None:
        return
    command: click.Command = main
    for word in shlex.split(called[1], comments=True):
        if isinstance(command, click.Group):
            assert word in command.commands, line
            command = command.commands[word]
        elif word.startswith("--"):
            options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            assert word.partition("=")[0] in options, line


def test_figures_are_measured() -> None:
    """Guards README and docs against figures that no kept document has."""
    assert figures.README.read_text(encoding="utf-8") == figures.filled(figures.README.read_text(encoding="utf-8"))
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page()


def test_the_readme_is_short() -> None:
    """Guards a newcomer's minute."""
    assert len(figures.README.read_text(encoding="utf-8").splitlines()) <= 120
