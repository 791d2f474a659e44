"""README and docs: links lead somewhere, code is code, commands exist, figures are those of the documents, references whole."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import yaml

import cascade
from benchmarks.figures import pages as figures
from cascade.cli.main import main
from cascade.client import AsyncClient, Client
from cascade.params import Handling, SamplingParams, Speculation
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.settings.router import AccessConfig
from deployments.gateway.http.api import HttpApi
from docs.generate import PAGES as FOLDER
from docs.generate import comments, filled, sections

ROOT = Path(__file__).parents[2]
WRITTEN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "cluster/README.md")
PAGES = [*(ROOT / name for name in WRITTEN), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("*.py", "*.proto", "*.yaml", "*.json", "*.sh", "*.html", "Dockerfile", "Makefile", "*.toml")
HISTORY = ("CHANGELOG.md", "log.md")  # tell of commands that are gone
TIER = {"name": "full", "model_loading_config": {"model_id": "some/model"}}
BLOCK = re.compile(r"^( *)(```|~~~)(\w*)[^\n]*\n(.*?)^\1\2", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    return ((match[3], match[4]) for match in BLOCK.finditer(page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Guards readers against pages and headings that have moved."""
    for target, anchor in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{target} of {page.name}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{target}#{anchor} of {page.name}"


def test_sources_name_pages_that_exist() -> None:
    """Guards readers of comments and error messages against pages that have moved."""
    listed = subprocess.run(["git", "ls-files", "--", *SOURCES], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split():
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md\b", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{page} in {name}"


def test_pages_name_files_that_exist() -> None:
    """Guards developers against files and rooms that have moved."""
    rooms = "benchmarks|cascade|cluster|deployments|docs|examples|protos|tests"
    for page in PAGES:
        if page.name not in HISTORY:
            for name in re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text(encoding="utf-8")):
                assert (ROOT / name).exists(), f"{name} of {page.name}"


def test_a_parameter_takes_eight_steps_downwards() -> None:
    """Guards strangers who follow a parameter: each step of the page exists, and none looks back at one before it."""
    shared = ("cascade/params", "cascade/messages", "deployments/gateway/model")
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| \d \| `([\w/]+)\.py` \| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(steps) == 8
    sources = [(ROOT / f"{file}.py").read_text(encoding="utf-8") for file, _ in steps]
    for (file, place), source in zip(steps, sources, strict=True):
        for name in place.split("."):
            assert re.search(rf"^ *(?:async )?(?:def|class) {name}\b", source, re.MULTILINE), f"{place} of {file}"
    for index, source in enumerate(sources):
        for file, _ in steps[:index]:
            assert file in shared or f"from {file.replace('/', '.')} import" not in source, (
                f"{steps[index][0]} looks back at {file}"
            )


def test_code_is_code() -> None:
    """Guards what readers copy: Python that compiles and imports, YAML that parses, pieces that the configuration takes."""
    for page in PAGES:
        for language, text in blocks(page):
            if language == "python":
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cascade"):
                        module = importlib.import_module(node.module or "")
                        assert all(hasattr(module, alias.name) for alias in node.names), f"{ast.unparse(node)} of {page.name}"
            elif language == "yaml":
                for values in yaml.safe_load_all(text):
                    if (whole := configuration(values)) is not None and "..." not in text:
                        CascadeConfig.parse(whole, page.name)


def configuration(values: Any) -> Mapping[str, Any] | None:
    """The cascade of a piece of its root or of a tier; `None` for what is no part of a configuration."""
    if not isinstance(values, Mapping):
        return None
    if values.keys() <= CascadeConfig.model_fields.keys():
        return {"tiers": [TIER]} | values
    return {"tiers": [TIER | values]} if values.keys() <= TierConfig.model_fields.keys() else None


def test_commands_exist() -> None:
    """Guards readers against commands and options of `cascade`, and targets of the Makefile, that are gone."""
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for page in PAGES:
        if page.name in HISTORY:
            continue
        text = page.read_text(encoding="utf-8")
        for language, block in blocks(page):
            if language in ("", "sh", "bash"):
                for line in block.replace("\\\n", " ").splitlines():
                    check(line)
        for span in re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)):
            check(span)
        for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE):
            assert target in targets, f"make {target} of {page.name}"


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
    for marked in figures.PAGES:
        assert marked.read_text(encoding="utf-8") == figures.filled(marked.read_text(encoding="utf-8"))
    assert figures.PICTURE.read_text(encoding="utf-8") == figures.drawn()
    assert not figures.unshown()


def test_the_readme_is_short() -> None:
    """Guards a newcomer's minute."""
    assert len(figures.README.read_text(encoding="utf-8").splitlines()) <= 100


def test_the_version_is_in_the_changelog() -> None:
    """Guards against a release that nothing is said of."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_site_is_built(tmp_path: Path) -> None:
    """Guards the site: pages that its menu lacks or invents, links and anchors that lead nowhere there."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


# reference pages


TEXTS = {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.md")}


def cells(page: str) -> list[list[str]]:
    """Of the rows of all tables of a page, without marks of code; a bar within a cell is kept."""
    lines = [line.replace("\\|", "\0") for line in page.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace("`", "").replace("\0", "|") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "<!-- generated:" in text])
def test_generated_parts_are_current(name: str) -> None:
    """Guards against pages that the code has left behind; `make docs` writes them anew."""
    assert filled(TEXTS[name]) == TEXTS[name], "run make docs"


def test_every_setting_says_what_it_means() -> None:
    """Guards readers of the configuration page against fields without a sentence."""
    for section in set(sections(CascadeConfig)):
        comment_of = comments(section)
        assert not [name for name in section.model_fields if not comment_of[name]], section.__name__


def test_every_route_is_on_a_page() -> None:
    """Guards the pages of HTTP against routes that nobody can find."""
    everything = "".join(text for name, text in TEXTS.items() if name.startswith("reference/"))
    unused: Any = None
    admission: Any = SimpleNamespace(access=SimpleNamespace(config=AccessConfig()))
    routes: list[Any] = HttpApi(unused, unused, admission, unused).application().routes
    paths = [route.path for route in routes]
    assert "/v1/completions" in paths
    for path in paths:
        assert f"{path.replace(':path', '')}`" in everything, path


@pytest.mark.parametrize("kind", [SamplingParams, Speculation, Handling], ids=lambda kind: kind.__name__)
def test_parameters_have_their_defaults(kind: Any) -> None:
    """Guards the page of parameters: every field has a row, and its default there is the code's."""
    page = TEXTS["reference/parameters.md"].split("## Order")[0]
    rows = {row[0]: row[3] for row in cells(page)}
    for field in fields(kind):
        assert field.default is not MISSING
        value = field.default
        shown = "none" if value in (None, (), "") else str(value).lower() if isinstance(value, bool) else str(value)
        assert rows[field.name] == shown, field.name


def test_public_names_are_on_a_page() -> None:
    """Guards the page of Python against classes that can be imported and are not told of."""
    pages = TEXTS["reference/python.md"] + TEXTS["reference/parameters.md"] + TEXTS["reference/errors.md"]
    for name in cascade.__all__:
        assert f"`{name}" in pages or f"## {name}\n" in pages, name


def test_clients_have_the_same_methods() -> None:
    """Guards what the page says of the asynchronous client by telling of the other one alone."""
    assert {name for name in vars(AsyncClient) if name[0] != "_"} == {name for name in vars(Client) if name[0] != "_"}
