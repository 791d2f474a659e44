"""Conversations become prompts by the template of the model, whatever it has forms for; what it has none for is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from deployments.chat.prompt import ChatTemplate
from deployments.chat.template import Style, Turn
from tests.doors import House
from tests.router.test_http import ask
from tests.talkers import talking

SAYS = "<{{ message.role }}>{{ message.content }}"
CALL = "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
EACH = "{% for call in message.tool_calls %}" + CALL + "{% endfor %}"
LOOP = "{% for message in messages %}BODY{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# bodies in the manner of families: with roles that they pass over, one call a turn, results written as JSON
KNOWN = "{% if message.role in ('user', 'assistant', 'tool') or loop.first and message.role == 'system' %}BODY{% endif %}"
PLAIN = "{% if message.tool_calls %}" + EACH + "{% else %}" + SAYS + "{% endif %}"
FIRST = "{% if message.tool_calls %}{% set call = message.tool_calls[0] %}" + CALL + "{% else %}" + SAYS + "{% endif %}"
SINGLE = "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time!') }}{% endif %}" + FIRST
ESCAPED = "{% if message.role == 'tool' %}<tool>{{ message.content | tojson }}{% else %}" + PLAIN + "{% endif %}"
BROKEN = "{{ tools | length }}" + SAYS
THINKS = "{% generation %}" + PLAIN + "{% endgeneration %}{% if think is defined and not think %}<think></think>{% endif %}"
ASKED: Turn = {"role": "user", "content": "Q"}


def chat(body: str) -> ChatTemplate:
    """The embedded tokenizer with this template."""
    tokenizer = Tokenizer.from_pretrained("cascade/family/weights/full")
    tokenizer.backend.chat_template = LOOP.replace("BODY", body)
    return ChatTemplate(tokenizer)


def written(template: ChatTemplate, turns: list[Turn], **style: Any) -> str:
    tokenizer = template._tokenizer
    return tokenizer.backend.decode(template.encode(turns, None, Style(**style)))  # type: ignore[return-value]


def calls(*ids: str) -> Turn:
    made = [{"id": id, "type": "function", "function": {"name": f"f_{id}", "arguments": {"a": 1}}} for id in ids]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(id: str, content: str) -> Turn:
    return {"role": "tool", "tool_call_id": id, "content": content, "name": f"f_{id}"}


def test_developers_are_heard() -> None:
    """Guards `developer`: templates of Qwen, Phi and others pass over that role, and what it said was lost without a word."""
    turns: list[Turn] = [{"role": "developer", "content": "Be brief."}, ASKED]
    assert written(chat(KNOWN.replace("BODY", PLAIN)), turns) == "<system>Be brief.<user>Q<assistant>"
    assert written(chat(PLAIN), turns) == "<developer>Be brief.<user>Q<assistant>"


def test_what_a_template_leaves_out_is_refused() -> None:
    """Guards system turns in mid-conversation, which some templates drop: the model was asked something else than it seemed."""
    turns: list[Turn] = [ASKED, {"role": "assistant", "content": "A"}, {"role": "system", "content": "Be brief."}, ASKED]
    template = chat(KNOWN.replace("BODY", PLAIN))
    with pytest.raises(InvalidRequest, match=r"leaves out a message of the role 'system' at this place, 'Be brief\.'"):
        template.encode(turns)
    assert "Be brief." in written(chat(PLAIN), turns)


def test_results_may_be_written_in_another_form() -> None:
    """Guards templates that write results as JSON text, as Llama's: they leave nothing out."""
    turns = [ASKED, calls("1"), result("1", '{"sun": "yes"}')]
    assert r"\"sun\"" in written(chat(ESCAPED), turns)


@pytest.mark.parametrize("body", [SINGLE, FIRST], ids=["refused", "dropped"])
def test_several_calls_fit_into_templates_of_one(body: str) -> None:
    """Guards Llama's templates, which refuse two calls in a turn, and others, which drop the second.

    Such calls come one behind the other, each with its result.
    """
    turns = [ASKED, calls("1", "2"), result("2", "R2"), result("1", "R1"), ASKED]
    one = '<call>f_{id} {{"a": 1}}<tool>R{id}'
    assert written(chat(body), turns) == f"<user>Q{one.format(id=1)}{one.format(id=2)}<user>Q<assistant>"
    both = '<call>f_1 {"a": 1}<call>f_2 {"a": 1}<tool>R2<tool>R1'
    assert written(chat(PLAIN), turns) == f"<user>Q{both}<user>Q<assistant>"


def test_templates_that_fail_are_no_failure_of_the_server() -> None:
    """Guards templates that raise what Python raises, as those written for tools only do: it was a failure of the server."""
    with pytest.raises(InvalidRequest, match=r"chat template does not take these messages: .*NoneType"):
        chat(BROKEN).encode([ASKED])


def test_variables_of_templates_are_for_clients() -> None:
    """Guards `chat_template_kwargs`: honoured if the template reads it, else refused; the library's own are not for clients."""
    template = chat(THINKS)
    assert written(template, [ASKED], values={"think": False}) == "<user>Q<think></think><assistant>"
    assert written(template, [ASKED], values={"think": True}) == "<user>Q<assistant>"
    for name in ("thinks", "chat_template", "messages", "tools", "tokenize", "bos_token", "range", "raise_exception"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs has '{name}': of these .* reads think"):
            template.encode([ASKED], None, Style({name: "x"}))


def test_whatever_a_template_stumbles_over_is_told() -> None:
    """Guards values of variables that a template computes with: one divided by nought, and that was a failure of the server."""
    with pytest.raises(InvalidRequest, match=r"chat template does not take these messages: .*zero"):
        chat("{{ 1 // think }}").encode([ASKED], None, Style({"think": 0}))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Parrots that know conversations."""
    with talking(tmp_path_factory.mktemp("hermes"), "hermes") as built:
        yield built


def test_begun_answers_go_on(served: House) -> None:
    """Guards `continue_final_message`: the model goes on behind the assistant's last words, in the same turn."""
    messages: Any = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "one two"}]
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        extra: Any = {"continue_final_message": True, "add_generation_prompt": False}
        answer = client.chat.completions.create(
            model=served.model, messages=messages, max_tokens=9, temperature=0, extra_body=extra
        )
    assert answer.choices[0].message.content == " three"
    backend = served.router.tokenizer.backend
    ids = ask(served, "/tokenize", {"messages": messages, "continue_final_message": True})[2]["tokens"]
    assert backend.decode(ids).endswith("<|assistant|>one two")
    begun = ask(served, "/tokenize", {"messages": messages})[2]["tokens"]
    assert backend.decode(begun).endswith("<|assistant|>one two<|end|><|assistant|>")
    ended = ask(served, "/tokenize", {"messages": messages, "add_generation_prompt": False})[2]["tokens"]
    assert backend.decode(ended).endswith("<|assistant|>one two<|end|>")


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing to go on with": (
        "/v1/chat/completions",
        {"continue_final_message": True},
        "the last message must be the assistant's",
    ),
    "both": (
        "/v1/chat/completions",
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt and continue_final_message are both true",
    ),
    "unread": ("/v1/chat/completions", {"chat_template_kwargs": {"thinking": 1}}, "reads none"),
    "no object": ("/v1/chat/completions", {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "of a prompt": ("/tokenize", {"messages": None, "prompt": "x", "continue_final_message": True}, "without messages"),
}


@pytest.mark.parametrize("name", BAD)
def test_styles_that_cannot_be_honoured_are_refused(served: House, name: str) -> None:
    """Guards the sentences."""
    path, body, words = BAD[name]
    status, _, answer = ask(served, path, {"messages": [{"role": "user", "content": "x"}]} | body)
    assert status == 400, answer
    assert words in answer["error"]["message"]


def test_answers_go_back_as_they_came(served: House) -> None:
    """Guards conversations that are kept as OpenAI's client dumps them: with fields that are null, which were refused."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": served.model, "max_tokens": 9, "temperature": 0}
        messages: list[Any] = [{"role": "user", "content": "one"}]
        message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        dumped = message.model_dump()
        assert dumped["refusal"] is None
        again = client.chat.completions.create(messages=[*messages, dumped, {"role": "user", "content": "two"}], **asked)
    assert again.choices[0].message.content == "two"
    wrong = {"role": "assistant", "content": "x", "refusal": "I will not."}
    status, _, answer = ask(served, "/v1/chat/completions", {"messages": [wrong, messages[0]]})
    assert (status, "messages.0.refusal" in answer["error"]["message"]) == (400, True), json.dumps(answer)


def test_named_templates_are_tried_too(tmp_path: Path) -> None:
    """Guards tokenizers with a template for tools beside the default one: variables of both are known, each is used."""
    tokenizer = Tokenizer.from_pretrained("cascade/family/weights/full")
    tokenizer.backend.chat_template = {  # type: ignore[assignment]
        "default": LOOP.replace("BODY", SAYS),
        "tool_use": LOOP.replace("BODY", "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ mood }}" + PLAIN),
    }
    template = ChatTemplate(tokenizer)
    assert template.shows_tools
    assert template.own is not None
    assert template.own.variables == ("mood",)
    assert written(template, [ASKED]) == "<user>Q<assistant>"
