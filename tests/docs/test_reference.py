"""Reference pages say what the code has: generated parts are current, and written ones name everything."""

from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import pytest

import cascade
from cascade.client import AsyncClient, Client
from cascade.params import Handling, SamplingParams, Speculation
from cascade.settings.config import CascadeConfig
from cascade.settings.router import AccessConfig
from deployments.gateway.http.api import HttpApi
from docs.generate import PAGES, comments, filled, sections

TEXTS = {path.relative_to(PAGES).as_posix(): path.read_text(encoding="utf-8") for path in PAGES.rglob("*.md")}


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
