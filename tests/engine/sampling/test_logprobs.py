"""Log-probabilities of answers and prompts: the full model's own, whatever else is asked for, over every protocol."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from benchmarks.toy import ToyModel
from cascade import Cascade, Completion, SamplingParams, Structured
from cascade.answer import Answer, PromptToken
from cascade.client import Client
from cascade.engine.sampling.processors import report, shape
from cascade.engine.sampling.state import SequenceState, state_maker
from cascade.messages import Proposal, mint
from cascade.scorer import Row, Scored
from cascade.session.session import MAX_PROMPT_SCORED
from tests import small
from tests.doors import House, serving
from tests.engine.sampling.test_logits_processors import PROMPT as TOY_PROMPT
from tests.engine.sampling.test_logits_processors import VOCAB, opening_of
from tests.http.test_http import PROMPT, ask
from tests.tier.test_tier import CountingModel, Inbox, Silent, alone, answered, finish
from tests.waiting import LONG_S

LONG = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n" * 20


class Watched(CountingModel):
    """Notes how many positions of each row were to give logits."""

    scored: ClassVar[list[int]] = []

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        self.scored += [row.num_scored for row in rows]
        return super().run(rows)


@pytest.fixture(scope="module")
def cascade() -> Iterator[Cascade]:
    with small.cascade() as cascade:
        yield cascade


served = serving(model=Watched)


@pytest.mark.parametrize(
    "chosen",
    [
        {"temperature": 0},
        {"temperature": 0.9, "repetition_penalty": 1.5, "logit_bias": {77: 5.0}, "min_tokens": 4, "logprobs": 1},
        {"structured": Structured(regex="[a-z]{1,5}")},
    ],
    ids=["plain", "shaped", "structured"],
)
@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
def test_they_equal_a_plain_forward(cascade: Cascade, prompt: str, chosen: dict[str, Any]) -> None:
    """Guards the numbers: those of Transformers for the same prompt, read in one or several passes; the text stays."""
    full = AutoModelForCausalLM.from_pretrained(small.paths()[-1], dtype=torch.float32)
    ids = cascade.tokenizer.encode(prompt)
    assert prompt is PROMPT or len(ids) > 2 * MAX_PROMPT_SCORED
    with torch.inference_mode():
        logs = full(torch.tensor([ids])).logits[0].log_softmax(-1)
    plain = cascade.generate(prompt, SamplingParams(max_tokens=12, seed=1, **chosen))
    params = SamplingParams(max_tokens=12, seed=1, prompt_logprobs=3, **chosen)
    for answer in (cascade.generate(prompt, params), cascade.generate([prompt, prompt], params)[1]):
        assert isinstance(plain, Completion)
        assert isinstance(answer, Completion)
        assert (answer.token_ids, answer.logprobs != ()) == (plain.token_ids, "logprobs" in chosen)
        assert [token.id for token in answer.prompt] == ids
        assert answer.prompt[0] == PromptToken(ids[0])
        for token, expected in zip(answer.prompt[1:], logs, strict=False):
            assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-3)
            assert [value for _, value in token.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-3)
    assert plain.prompt == ()


def test_pieces_bring_them_once(cascade: Cascade) -> None:
    """Guards streams: the first piece has them; a prompt of one token has nothing to tell."""
    params = SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=0)
    first, *others = cascade.stream(PROMPT, params)
    assert len(first.prompt) == len(cascade.tokenizer.encode(PROMPT))
    assert all(token.top == () for token in first.prompt)
    assert others
    assert not any(chunk.prompt for chunk in others)
    single = cascade.generate([77], params)
    assert isinstance(single, Completion)
    assert single.prompt == (PromptToken(77),)


@pytest.mark.parametrize("tokenized", [False, True])
def test_every_protocol_says_the_same(served: House, tokenized: bool) -> None:
    """Guards gRPC and OpenAI's `echo` with `logprobs`, whole and streamed: the prompt's tokens before the answer's."""
    ids = served.router.tokenizer.encode(PROMPT)
    prompt = ids if tokenized else PROMPT
    with Client(served.grpc) as client:
        params = SamplingParams(max_tokens=8, seed=3, logprobs=2, prompt_logprobs=2)
        told = client.generate(prompt, params)
        assert [token.id for token in told.prompt] == ids
        assert [chunk.prompt for chunk in client.stream(PROMPT, params) if chunk.prompt] == [told.prompt]
    asked: dict[str, Any] = {"model": served.model, "prompt": prompt, "n": 2, "seed": 3, "max_tokens": 8}
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        choices = client.completions.create(echo=True, logprobs=2, **asked).choices
        pieces = list(client.completions.create(echo=True, logprobs=2, stream=True, **asked))
    for choice in choices:
        said: Any = choice.logprobs
        assert said.token_logprobs[0] is None
        assert said.top_logprobs[0] is None
        assert said.token_logprobs[1 : len(ids)] == pytest.approx([token.logprob for token in told.prompt[1:]])
        assert "".join(said.tokens[: len(ids)]) == PROMPT == choice.text[: len(PROMPT)]
        places = list(zip(said.text_offset, said.tokens, strict=True))[: len(ids)]
        assert all(choice.text.startswith(one, begin) for begin, one in places)
        assert len(said.tokens) == len(ids) + 8
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for one in mine for value in getattr(one.logprobs, name)] == getattr(said, name)
    assert choices[0].logprobs.token_logprobs[len(ids) :] == pytest.approx([one.logprob for one in told.logprobs])
    assert choices[0].text == PROMPT + told.text


def test_logits_of_prompts_are_bounded(served: House) -> None:
    """Guards memory: no row gives logits of more positions at once than may be; others give none of their prompts."""
    Watched.scored.clear()
    ids = list(range(1, 700))
    with Client(served.grpc) as client:
        plain = client.generate(ids, SamplingParams(max_tokens=4, temperature=0))
        assert max(Watched.scored) < MAX_PROMPT_SCORED // 2
        told = client.generate(ids, SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0))
    assert told.text == plain.text
    assert len(told.prompt) == 699
    assert max(Watched.scored) == MAX_PROMPT_SCORED


def test_wrong_numbers_are_refused(served: House) -> None:
    """Guards the range, by every name."""
    status, _, answer = ask(served, "/v1/completions", {"prompt": "x", "echo": True, "logprobs": 21})
    assert (status, "logprobs is 21" in answer["error"]["message"]) == (400, True)
    with pytest.raises(ValueError, match="prompt_logprobs is -1"):
        SamplingParams(prompt_logprobs=-1)


# of answers


def test_replay_keeps_logprobs() -> None:
    """Guards log-probabilities against the death of a full replica: none lost, none twice, those of one that lived."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4, logprobs=2)

    request = opening_of(params, ends=frozenset())
    inbox, answer = Inbox(), Answer(request, Silent())
    with alone(ToyModel(VOCAB), new_state=state_maker()) as first:
        first.post([request], inbox)
        while answer.num_tokens < 15:
            message = inbox.messages.get(timeout=LONG_S)
            assert isinstance(message, Proposal)
            answer.receive(Proposal(message.session, message.start, message.draft.first(20), logprobs=message.logprobs[:20]))
        first.drop(inbox)
    with alone(ToyModel(VOCAB), new_state=state_maker()) as second:
        again = answer.replay(mint())
        second.post([again], inbox)
        finish(second, inbox, {again.session: answer})
        [whole], _ = answered(second, replace(request, session=mint()))
    assert answer.tokens == whole.tokens
    assert answer.logprobs == whole.logprobs
    assert len(answer.logprobs) == 40


def test_logprobs_are_those_of_raw_logits() -> None:
    """Guards against log-probabilities after temperature or penalties, and of another position or token."""
    logits = torch.randn(3, VOCAB)
    params = SamplingParams(temperature=0.3, seed=1, logprobs=2, logit_bias={4: 50.0}, repetition_penalty=2.0)
    opening = opening_of(params)
    state = SequenceState(opening, list(TOY_PROMPT))
    row = Row(None, 0, (*TOY_PROMPT, 4, 4), 3, params, state)
    shape(logits, [row])
    report(logits, [row], [[4, 4, 4]])
    logs = logits.log_softmax(-1)
    for said, expected in zip(state.logprobs(len(TOY_PROMPT), 3), logs, strict=True):
        assert said.logprob == pytest.approx(expected[4].item())
        assert [token for token, _ in said.top] == expected.topk(2).indices.tolist()
        assert [value for _, value in said.top] == pytest.approx(expected.topk(2).values.tolist())
