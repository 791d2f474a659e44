"""What the benchmark of published speeds makes of raw figures."""

import pytest

from benchmarks.published import pipespec
from tests.cases import rare

DATA = pipespec.Data.load()
TEXTS = pipespec.recording(DATA)


def test_recorded_drafts_are_right_where_they_were_measured() -> None:
    """Guards the figures against made-up agreement: along the answers each draft is right where its raw figures say so."""
    for level, model in enumerate(pipespec.NAMES[:-1]):
        for text, right in zip(TEXTS.texts, DATA.right[model], strict=True):
            said = [one[0].token == full[0].token for one, full in zip(text.ranked[level], text.ranked[-1], strict=True)]
            assert len(said) == len(right)
            assert all(same == (mark == "1") for same, mark in zip(said, right, strict=True) if mark != "?")


@pytest.mark.parametrize("chain", [("1B", "70B"), *map(rare, [("8B", "70B"), pipespec.NAMES])])
def test_the_simulator_predicts_speeds_that_were_measured(chain: tuple[str, ...]) -> None:
    """Guards plans for clusters: loops, links and waits in virtual time cost what they cost PipeSpec, within 5 %."""
    name = " → ".join(chain)
    assert pipespec.lockstep(DATA, TEXTS, chain) == pytest.approx(DATA.token_ms[f"lockstep {name}"], rel=0.05)
    assert pipespec.asynchronous(DATA, TEXTS, chain) == pytest.approx(DATA.token_ms[f"asynchronous {name}"], rel=0.05)
