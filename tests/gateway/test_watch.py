"""Watched requests: streams tell of guesses that nobody has judged yet; others pay nothing for it."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from cascade.answer import Answer
from cascade.client import Client
from cascade.draft import Draft
from cascade.errors import InvalidRequest
from cascade.messages import Lane, Message, Proposal, origin
from cascade.params import Handling, SamplingParams, Speculation
from cascade.scorer import Scored
from cascade.session.session import Session
from cascade.simulation.toy import ToyModel
from cascade.tier.tier import Tier
from tests.doors import House, serving
from tests.http.test_http import PROMPT, ask
from tests.tier.test_tier import Inbox, Silent, finish, opening, running

PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=3, ignore_eos=True)
WATCHED = Handling(watch=True)
ALL = Speculation(tiers=("tiny", "medium"))  # whether they pay or not


served = serving(pass_s=0.002, pace=(1, 5, 25))


def test_lanes_are_guesses(served: House) -> None:
    """Guards what is shown: guesses of both tiers ahead of the text, some are kept, some rolled back; the text stays."""
    with Client(served.grpc) as client:
        plain = client.generate(PROMPT, PARAMS)
        chunks = list(client.stream(PROMPT, PARAMS, ALL, WATCHED))
        assert not any(chunk.lanes for chunk in client.stream(PROMPT, PARAMS, ALL))
    completion = chunks[-1].completion
    assert completion is not None
    assert completion.token_ids == plain.token_ids == sum((chunk.token_ids for chunk in chunks), ())
    num_tokens, right, wrong, trees = 0, 0, 0, 0
    for chunk in chunks:
        num_tokens += len(chunk.token_ids)
        for lane in chunk.lanes:
            assert lane.start >= num_tokens
            tree = Draft(lane.tokens, bytes(len(lane.tokens)), parents=lane.parents)
            rest = plain.token_ids[lane.start :]
            pairs = [(token, rest[depth]) for token, depth in zip(tree.tokens, tree.depths, strict=True) if depth < len(rest)]
            trees += not tree.is_line
            right += sum(guess == token for guess, token in pairs)
            wrong += sum(guess != token for guess, token in pairs)
    assert {lane.tier for chunk in chunks for lane in chunk.lanes} == {"medium", "tiny"}
    assert right > 0
    assert wrong > 0
    assert trees > 0


def test_lanes_over_http(served: House) -> None:
    """Guards the extension of streams, in both kinds of completions; whole answers have nothing to watch."""
    extra = {"watch": True, "speculation": {"tiers": ["tiny", "medium"]}}
    asked: dict[str, Any] = {"model": served.model, "max_tokens": 16, "seed": 3, "stream": True, "extra_body": extra}
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        for pieces in (
            list(client.completions.create(prompt=PROMPT, echo=True, logprobs=0, **asked)),
            list(client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **asked)),
        ):
            extras: list[Any] = [getattr(piece.choices[0], "cascade", None) or {} for piece in pieces]
            lanes = [lane for extra in extras for lane in extra.get("lanes", ())]
            assert {lane["tier"] for lane in lanes} == {"medium", "tiny"}
            assert all(set(lane) == {"tier", "start", "tokens", "parents"} for lane in lanes)
            assert "edges" in extras[-1]
    status, _, answer = ask(served, "/v1/completions", {"prompt": PROMPT, "watch": True})
    assert (status, "watch is given without stream" in answer["error"]["message"]) == (400, True), json.dumps(answer)
    with Client(served.grpc) as client, pytest.raises(InvalidRequest, match="watch is true: only streams"):
        client.generate(PROMPT, PARAMS, None, WATCHED)


class Heard(Inbox):
    """Keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.proposals: list[Proposal] = []

    def send(self, messages: Sequence[Message]) -> None:
        self.proposals += [message for message in messages if isinstance(message, Proposal)]
        super().send(messages)


@pytest.mark.parametrize("watch", [False, True])
def test_only_watched_sessions_send_more(watch: bool) -> None:
    """Guards the cost of everybody else: one proposal a pass, without lanes."""
    tiers = [Tier("0", 0, ToyModel(agreement=0.6, pass_s=0.002)), Tier("1", 1, ToyModel(pass_s=0.04))]
    request = replace(opening(3, 0.5, 12, chain=("0",)), watch=watch)
    inbox, answer = Heard(), Answer(request, Silent())
    with contextlib.contextmanager(running)(tiers):
        tiers[-1].post([request], inbox)
        finish(tiers[-1], inbox, {request.session: answer})
    own_passes = sum(edge.passes for edge in answer.edges if edge.verifier == "1")
    assert (len(inbox.proposals) > own_passes) == watch
    assert any(said.lanes for said in inbox.proposals) == watch


def test_lanes_are_trees_behind_the_text() -> None:
    """Guards guesses that are shown: the drafter tells its whole tree, tiers below it what is left behind the text, and nothing
    after a text that was cut."""
    session = Session(replace(opening(3, 0.0, 20, chain=("medium",)), watch=True), "full", 2, 32)
    session.attach("medium", "m", ())
    session.kv_len = len(session.text) - 1
    end = len(session.text)
    tree = Draft((1, 2, 3, 4), bytes([origin(1, False)] * 4), parents=(-1, 0, -1, 2))
    tiny = Lane("tiny", end + 2, (5, 6, 7, 8), (-1, 0, 0, -1))
    session.propose(Proposal("m", end, tree, lanes=(tiny,)))
    assert session.lanes == (Lane("medium", end, (1, 2, 3, 4), (-1, 0, -1, 2)), tiny)
    session.advance(session.work(100, [0, 1]), Scored((1, 2, 5)))
    assert session.lanes == (Lane("medium", end + 3, ()), Lane("tiny", end + 3, (6, 7), (-1, -1)))
    assert tiny.after([*session.text[: end + 2], 9]).tokens == ()
    session.detach()
    assert session.lanes == ()
