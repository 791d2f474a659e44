"""`docs/conformance.md`: every parameter, over both protocols, with and without drafts; and its promises are kept."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from doors import House, house
from test_http import PROMPT, ask

from cascade.client import Client
from cascade.handling import Handling
from cascade.params import SamplingParams, Speculation

ROOT = Path(__file__).parents[1]
CHOSEN: dict[str, dict[str, Any]] = {  # values that are not the defaults
    "max_tokens": {"max_tokens": 7},
    "min_tokens": {"min_tokens": 20},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.5},
    "seed": {"seed": 12},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "logit_bias": {"logit_bias": {77: 20.0}},
    "stop": {"stop": ("e", "a")},
    "stop_token_ids": {"stop_token_ids": (77,), "logit_bias": {77: 5.0}},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 2},
}


@pytest.fixture(scope="module")
def served() -> Iterator[House]:
    with house() as built:
        yield built
        built.settle()


def rows() -> list[list[str]]:
    """Cells of the table."""
    lines = (ROOT / "docs/conformance.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_parameter_means_the_same_everywhere(served: House, name: str) -> None:
    """Guards every parameter on both protocols: with drafts and without, whole and cut, the text is the same."""
    options = {"max_tokens": 24, "seed": 3, **CHOSEN[name]}
    body = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    texts = []
    with Client(served.grpc) as client:
        for mode in ("off", "auto"):
            completion = client.generate(PROMPT, SamplingParams(**options), Speculation(mode))  # type: ignore[arg-type]
            texts.append((completion.text, completion.finish_reason))
            asked = {"prompt": PROMPT, "speculation": {"mode": mode}, **body}
            status, _, answer = ask(served, "/v1/completions", asked)
            assert status == 200, answer
            choice = answer["choices"][0]
            texts.append((choice["text"], choice["finish_reason"]))
            assert (choice["logprobs"] is not None) == (name == "logprobs")
    assert len(set(texts)) == 1, texts


def test_handling_changes_no_text(served: House) -> None:
    """Guards priority and salt over both protocols."""
    params = SamplingParams(max_tokens=24, seed=3)
    with Client(served.grpc) as client:
        plain = client.generate(PROMPT, params).text
        handled = client.generate(PROMPT, params, None, Handling(-5, "mine")).text
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "priority": -5, "cache_salt": "mine"}
    status, _, answer = ask(served, "/v1/completions", body)
    assert status == 200, answer
    assert plain == handled == answer["choices"][0]["text"]


def test_the_table_is_complete_and_its_tests_exist() -> None:
    """Guards the page against a parameter without a row, and a row without a test."""
    table = rows()
    wanted = {field.name for kind in (SamplingParams, Speculation, Handling) for field in fields(kind)}
    assert {row[0].strip("`") for row in table} == wanted
    assert len(table) == len(wanted)
    for row in table:
        tests = [word for cell in row[1:] for word in cell.replace("`", "").split() if "::" in word]
        assert tests, row
        for path, _, name in (test.partition("::") for test in tests):
            tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
            functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in functions, f"{path}::{name}"
