"""What a pass decided is told while the next one runs."""

from collections.abc import Sequence

import pytest

from cascade.messages import Close, Link, Message, Open
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.scorer import Row
from cascade.simulation.toy import ToyCache, ToyModel
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.loop import Limits, Loop
from cascade.tier.runner import row_of
from cascade.tier.tier import Tier
from tests.tier.test_tier import opening
from tests.waiting import wait_until

LAUNCH, SEND = "launch", "send"


class Noted(ToyModel, Link):
    """A model and the link above its tier, which note in one list what happens to them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        self.events.append(LAUNCH)
        return super().launch(rows)

    def send(self, messages: Sequence[Message]) -> None:
        self.events.append(SEND)


def test_a_device_never_waits_for_what_was_decided_to_be_told() -> None:
    """Guards devices: proposals were encoded and sent between the end of a pass and the start of the next."""
    noted = Noted()
    tier = Tier("full", 0, noted)
    tier.post([opening(max_tokens=3)], noted)
    tier.start()
    wait_until(lambda: noted.events.count(SEND) == 3)
    tier.close()
    assert noted.events[:6] == [LAUNCH, LAUNCH, SEND, LAUNCH, SEND, SEND], "the last token is followed by no pass"


@pytest.mark.parametrize("others", [0, 1])
def test_sessions_that_leave_before_they_are_told_harm_nobody(others: int) -> None:
    """Guards the loop against a client that hangs up as its pass ends: it divided by the number of sessions."""
    model, sent = ToyModel(), list[Message]()
    loop = Loop[str](
        "full", 2, Limits(model.vocab_size, 4096, Policy()), KVAdmission(ToyCache, 1 << 20), Profile(),
        send_up=lambda up, message: sent.append(message), send_down=lambda tier, message: None,
    )  # fmt: skip
    first, *rest = (Open(str(number), opening(adaptive=True).spec) for number in range(1 + others))
    for one in (first, *rest):
        loop.receive(one, "router", 0.0)
    batch, _ = loop.schedule(512, 0.0)
    loop.advance(batch, model.run([row_of(*row) for row in batch]), 1.0)
    loop.receive(Close(first.session), None, 1.0)
    loop.settle(1.0)
    assert [message.session for message in sent] == [one.session for one in rest]
