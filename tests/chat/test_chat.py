"""Conversations over HTTP: begun answers, what may be said of prompts, and answers that go back as they came."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.doors import House
from tests.http.test_http import ask
from tests.talkers import talking


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Parrots that know conversations."""
    with talking(tmp_path_factory.mktemp("hermes"), "hermes") as built:
        yield built


def test_begun_answers_go_on(served: House) -> None:
    """Guards `continue_final_message`: the model goes on after the assistant's last words, in the same turn."""
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
