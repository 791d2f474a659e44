"""Log-probabilities of answers and prompts: the full model's own, whatever else is asked for, over every protocol."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from cascade import Cascade, SamplingParams, Structured
from cascade.answer import PromptToken
from cascade.client import Client
from cascade.engine.sampling.state import state_maker
from cascade.scorer import Row
from cascade.session.session import MAX_PROMPT_SCORED
from tests import small
from tests.cases import crossed
from tests.http.test_http import PROMPT
from tests.in_process import House, serving
from tests.tier.test_tier import alone, opening, written
from tests.toys import ToyModel

LONG = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n" * 20


class Watched(ToyModel):
    """Notes how many positions of each row were to give logits."""

    most = 0

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        self.most = max(self.most, *(row.num_scored for row in rows))
        return super().launch(rows)


@pytest.fixture(scope="module")
def cascade() -> Iterator[Cascade]:
    with small.cascade() as cascade:
        yield cascade


served = serving()


CHOSEN = {
    "plain": {"temperature": 0},
    "shaped": {"temperature": 0.9, "repetition_penalty": 1.5, "logit_bias": {77: 5.0}, "min_tokens": 12, "logprobs": 2},
    "structured": {"structured": Structured(regex="[a-z]{1,5}")},
}


@pytest.fixture(scope="module")
def full() -> Any:
    return AutoModelForCausalLM.from_pretrained(small.paths()[-1], dtype=torch.float32)


def assert_logprob(entry: Any, token: int, expected: torch.Tensor) -> None:
    assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-3)
    assert [value for _, value in entry.top] == pytest.approx(expected.topk(len(entry.top)).values.tolist(), abs=1e-3)
    assert all(value == pytest.approx(float(expected[id]), abs=1e-3) for id, value in entry.top)


@pytest.mark.parametrize(("chosen", "prompt"), crossed(CHOSEN, {"long": LONG, "short": PROMPT}))
def test_they_equal_a_plain_forward(cascade: Cascade, full: Any, chosen: dict[str, Any], prompt: str) -> None:
    """Guards the numbers: those of Transformers for the same prompt, read in one or several passes; the text stays."""
    ids = cascade.tokenizer.encode(prompt)
    assert prompt is PROMPT or len(ids) > 2 * MAX_PROMPT_SCORED
    plain = cascade.generate(prompt, SamplingParams(max_tokens=12, seed=1, **chosen))
    params = SamplingParams(max_tokens=12, seed=1, prompt_logprobs=3, **chosen)
    for answer in (cascade.generate(prompt, params), cascade.generate([prompt, prompt], params)[1]):
        assert answer.token_ids == plain.token_ids
        assert [token.id for token in answer.prompt] == ids
        assert answer.prompt[0] == PromptToken(ids[0])
        with torch.inference_mode():
            logs = full(torch.tensor([[*ids, *answer.token_ids]])).logits[0].log_softmax(-1)
        for token, expected in zip(answer.prompt[1:], logs, strict=False):
            assert_logprob(token, token.id, expected)
        assert len(answer.logprobs) == (12 if "logprobs" in chosen else 0)
        for entry, id, expected in zip(answer.logprobs, answer.token_ids, logs[len(ids) - 1 :], strict=False):
            assert_logprob(entry, id, expected)
    assert plain.prompt == ()


@pytest.mark.parametrize("tokenized", [False, True])
def test_every_protocol_says_the_same(served: House, tokenized: bool) -> None:
    """Guards gRPC and OpenAI's `echo` with `logprobs`, whole and streamed: the prompt's tokens before the answer's."""
    ids = served.router.model.tokenizer.encode(PROMPT)
    prompt = ids if tokenized else PROMPT
    with Client(served.grpc) as client:
        params = SamplingParams(max_tokens=8, seed=3, logprobs=2, prompt_logprobs=2)
        answer = client.generate(prompt, params)
        assert [token.id for token in answer.prompt] == ids
        assert [chunk.prompt for chunk in client.stream(PROMPT, params) if chunk.prompt] == [answer.prompt]
    request: dict[str, Any] = {"model": served.model, "prompt": prompt, "n": 2, "seed": 3, "max_tokens": 8}
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        choices = client.completions.create(echo=True, logprobs=2, **request).choices
        pieces = list(client.completions.create(echo=True, logprobs=2, stream=True, **request))
    for choice in choices:
        logprobs: Any = choice.logprobs
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx([token.logprob for token in answer.prompt[1:]])
        assert "".join(logprobs.tokens[: len(ids)]) == PROMPT == choice.text[: len(PROMPT)]
        places = list(zip(logprobs.text_offset, logprobs.tokens, strict=True))[: len(ids)]
        assert all(choice.text.startswith(token, begin) for begin, token in places)
        assert len(logprobs.tokens) == len(ids) + 8
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in mine for value in getattr(part.logprobs, name)] == getattr(logprobs, name)
    assert choices[0].logprobs.token_logprobs[len(ids) :] == pytest.approx([entry.logprob for entry in answer.logprobs])
    assert choices[0].text == PROMPT + answer.text


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_logits_of_prompts_are_bounded(prompt_logprobs: int | None) -> None:
    """Guards memory: no row gives logits of more positions at once than may be; others give none of their prompts."""
    model, params = Watched(), SamplingParams(max_tokens=4, temperature=0, seed=0, prompt_logprobs=prompt_logprobs)
    with alone(model, new_state=state_maker()) as tier:
        [answer], _ = written(tier, opening(tokens=(1, 2, 3) * 100, prompt_len=300, chain=(), params=params))
    assert len(answer.prompt) == (0 if prompt_logprobs is None else 300)
    assert model.most == (1 if prompt_logprobs is None else MAX_PROMPT_SCORED)
