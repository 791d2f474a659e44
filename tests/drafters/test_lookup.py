"""Drafters without a model: they join as the bottom of a chain, make repetitions cheap, and change no text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from cascade.chain.local_links import Drafter, join
from cascade.chain.session import Session
from cascade.chain.tier import Tier
from cascade.drafters import KINDS, Lookup
from cascade.drafters.lookup import NGRAM
from cascade.messages import Close, Commit, Link, Message, Open, Proposal
from cascade.scorer import Row, Scored
from cascade.simulation.toy import ToyModel, full_text
from tests.chain.test_tier import Inbox, opening, settle, text_of

PERIOD = (3, 1, 4, 1, 5, 9, 2, 6)


class Parrot(ToyModel):
    """Says `PERIOD` over and over, whatever it hears, but for every 29th position."""

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        super().run(rows)
        ends = [row.start + len(row.fed) for row in rows]
        return [
            Scored([PERIOD[p % len(PERIOD)] if p % 29 else 7 for p in range(end - row.num_scored + 1, end + 1)])
            for row, end in zip(rows, ends, strict=True)
        ]


class Sevens:
    """The shortest drafter that there can be: it says that everything goes on with sevens."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}

    def post(self, messages: Sequence[Message], up: Link | None = None) -> None:
        for message in messages:
            if isinstance(message, Open):
                self.sessions[message.session] = Session(message, "sevens", 0, 32)
            session = self.sessions[message.session]
            if isinstance(message, Commit):
                session.commit(message.start, message.tokens)
            while not session.stalled and not isinstance(message, Close):
                session.advance(session.work(1000), Scored((7,)))
            if up is not None and (proposal := session.proposal()) is not None:
                up.send([proposal])


@pytest.fixture(params=["lookup", "sevens"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return {"lookup": Lookup, "sevens": Sevens}[request.param]()


@pytest.fixture(params=["alone", "below two tiers"])
def tiers(request: pytest.FixtureRequest, drafter: Drafter) -> Iterator[list[Tier]]:
    """Toy tiers with the drafter at the bottom."""
    lower = [ToyModel(agreement=0.6), ToyModel(agreement=0.8)] if request.param != "alone" else []
    made = [Tier(str(level), level, model) for level, model in enumerate([*lower, ToyModel()])]
    join(made, {"drafter": drafter})
    for tier in made:
        tier.start()
    yield made
    for tier in reversed(made):
        tier.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_is_the_full_models(tiers: list[Tier], temperature: float) -> None:
    """Guards losslessness against a drafter that answers in the verifier's own thread, and is wrong nearly always."""
    chain = (*(tier.name for tier in reversed(tiers[:-1])), "drafter")
    for seed in range(4):
        request = replace(opening(seed, temperature, 60), chain=chain)
        assert text_of(tiers[-1], request)[0] == full_text(ToyModel(), request)
    settle(tiers)


def test_a_text_that_repeats_itself_takes_few_passes() -> None:
    """Guards the speed that it is for, through the bends in a text that repeats itself but for a token now and then."""
    tier = Tier("full", 0, Parrot())
    join([tier], {"lookup": Lookup()})
    tier.start()
    request = replace(opening(0, 0.0, 200), chain=("lookup",))
    text = text_of(tier, request)[0]
    expected = [PERIOD[p % len(PERIOD)] if p % 29 else 7 for p in range(request.prompt_len, request.prompt_len + 200)]
    assert text[request.prompt_len :] == expected
    assert tier.stats.passes < 200 / 3
    tier.close()


def test_what_was_cut_is_not_repeated() -> None:
    """Guards the index against the text that a correction has cut: what stood there before must not be said again."""
    lookup, said = Lookup(), Inbox()
    begin = (1, 2, 3, 4, 5, 6, 7, 8)
    lookup.post([Open("s", begin, len(begin), opening(0, 0.0, 40).params, window=8)], said)
    lookup.post([Commit("s", 8, (1, 2, 3, 9))], said)
    lookup.post([Commit("s", 11, (4, 1, 2, 3))], said)  # 9 was wrong
    lines = []
    while not said.messages.empty():
        message = said.messages.get_nowait()
        assert isinstance(message, Proposal)
        lines.append((message.start, message.draft.tokens))
    assert lines[-1] == (15, (4, 1, 2, 3, 4, 1, 2, 3))
    assert all(9 not in tokens for start, tokens in lines if start > 11)
    lookup.post([Close("s")])
    assert not lookup._texts
    assert NGRAM == 3


def test_kinds_are_made_of_a_name_and_a_level() -> None:
    """Guards the configuration: every kind can be made of what a server knows."""
    for kind, make in KINDS.items():
        make(kind, 3).post([Close("nobody")])
