"""The page of comparison says what is true: fields that work are taken, others are refused with a sentence, routes exist."""

import re
from pathlib import Path
from typing import Any

from deployments.gateway.http.openai import ChatBody, CompletionBody
from tests.http.test_http import ask
from tests.in_process import House, serving

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "comparison.md").read_text(encoding="utf-8")
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "seed": 3}
TEXT = {"prompt": "x", "max_tokens": 2, "seed": 3}
INERT: dict[str, Any] = {  # values of fields without effect, which are texts where nothing else is said
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
    "best_of": 1,
    "include_stop_str_in_output": False,
    **dict.fromkeys(("store", "skip_special_tokens", "spaces_between_special_tokens"), True),
}


def rows(section: str) -> dict[str, str]:
    """What the page says of each name of a section."""
    table = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name: cells[-1].strip() for cells in lines for name in re.findall(r"`([^`]+)`", cells[0])}


served = serving()


def test_fields_are_taken_or_refused_as_the_page_says(served: House) -> None:
    """Guards newcomers, who send what other servers take: it works or is named, or is refused with a sentence."""
    fields = rows("Request fields")
    assert len(fields) > 100
    for name, support in fields.items():
        assert any(name in names(body) for body in (CompletionBody, ChatBody)) != support.startswith("refused"), name
        if support.startswith("refused"):
            status, _, answer = ask(served, "/v1/completions", {**TEXT, name: 1})
            assert (status, answer["error"]["message"].split()[0]) == (400, name), name
    unset = dict.fromkeys(name for name, support in fields.items() if support.startswith("refused"))
    assert ask(served, "/v1/completions", {**TEXT, **unset})[0] == 200  # clients write out all fields that they know
    inert = {name: INERT.get(name, "x") for name, support in fields.items() if support.startswith("no effect")}
    for path, base, more in (("/v1/completions", TEXT, {}), ("/v1/chat/completions", CHAT, {"reasoning_effort": "low"})):
        given = inert | more
        answers = [ask(served, path, {**base, **fields}) for fields in (given, dict.fromkeys(given), {})]
        assert [status for status, *_ in answers] == [200] * 3
        assert set(re.findall(r"\w+(?=[,\"])", answers[0][1]["warning"])) == {*given}
        assert not any("warning" in headers for _, headers, _ in answers[1:])  # fields of null are none
        choices = [answer["choices"][0] for *_, answer in answers]
        assert len({choice.get("text") or choice["message"]["content"] for choice in choices}) == 1


def names(body: Any) -> set[str]:
    """Of all fields that a request may have."""
    return {*body.model_fields, "structured_outputs"}


def test_fields_that_are_taken_are_on_the_page() -> None:
    """Guards the page against fields that it forgets; our own have no row."""
    ours = {"adapter", "structured", "speculation", "history", "resume", "train"}
    assert (
        names(CompletionBody) | names(ChatBody)
        == {name for name, support in rows("Request fields").items() if not support.startswith("refused")} | ours
    )
