"""Text and tokens are cut at ends, stop strings and limits, token by token, however the proposals arrive."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.answer import Answer, Chunk, Completion, undrafted
from cascade.draft import Draft
from cascade.messages import Capabilities, Edge, Logprobs, Proposal, SessionSpec
from cascade.params import MOST_BRANCHES, Handling, SamplingParams, Speculation, Structured
from tests.cases import examples

END = 0
WORDS = ["", "a", "b", "ab", "\n", "\n\n", " c", "x.y", "é"]


class Words:
    def step(self, token: int) -> str:
        return WORDS[token]

    def flush(self) -> str:
        return ""


def answer_of(params: SamplingParams) -> Answer:
    spec = SessionSpec((1, 2), 2, params.seeded(), ends=frozenset() if params.ignore_eos else frozenset([END]))
    return Answer(spec, Words())


def pieces(answer: Answer, tokens: Sequence[int], sizes: Sequence[int] = ()) -> list[Chunk]:
    """What comes of an answer whose tokens come in proposals of these sizes, or one at a time; each repeats the one before."""
    begin = last = answer.num_tokens
    chunks = []
    for size in sizes or [1] * len(tokens):
        end = min(len(tokens), begin + size)
        draft = Draft(tuple(tokens[last:end]), b"\2" * (end - last))
        logprobs = tuple(Logprobs(float(-token)) for token in draft.tokens)
        chunks.append(answer.receive(Proposal("s", 2 + last, draft, logprobs=logprobs))[0])
        last, begin = begin, end
    return [piece for piece in chunks if piece is not None]


def whole(chunks: Sequence[Chunk]) -> Completion | None:
    completion = next((piece.completion for piece in chunks if piece.completion is not None), None)
    if completion is not None:
        assert "".join(piece.text for piece in chunks) == completion.text
        assert tuple(id for piece in chunks for id in piece.token_ids) == completion.token_ids
    return completion


def reference(params: SamplingParams, tokens: Sequence[int]) -> tuple[str, str | None]:
    """Text and finish reason, one token at a time over the whole text."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        ended = token == END and not params.ignore_eos
        text += WORDS[token]
        cuts = [text.find(stop) for stop in params.stop if stop in text]
        if cuts:
            return text[: min(cuts)], "stop"
        if ended:
            return text, "stop"
        if count == params.max_tokens:
            return text, "length"
    return text, None


@settings(max_examples=examples(4))
@given(
    tokens=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=20),
    stop=st.lists(st.sampled_from(["ab", "\n\n", "ba", "a\n", ".", "é c", "abab"]), max_size=3),
    max_tokens=st.integers(1, 20),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_cuts_do_not_depend_on_the_size_of_proposals(
    tokens: list[int], stop: list[str], max_tokens: int, ignore_eos: bool, seed: int
) -> None:
    """Guards ends that are counted per pass, which cut too late, and ids and log-probabilities of what was cut (vLLM 47616)."""
    params = SamplingParams(max_tokens=max_tokens, stop=tuple(stop), ignore_eos=ignore_eos, seed=1, logprobs=0)
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(2 * len(tokens) + 2)]
    text, reason = reference(params, tokens)
    completion = whole(pieces(answer_of(params), tokens, sizes))
    assert (completion is not None) == (reason is not None)
    if completion is not None:
        ids = completion.token_ids
        assert (completion.text, completion.finish_reason) == (text, reason)
        assert ids == tuple(tokens[: len(ids)])
        spelt = "".join(WORDS[token] for token in ids)
        assert spelt.startswith(text)
        assert len(spelt) - len(text) <= max(0, len(WORDS[ids[-1] if ids else END]) - 1), "ids of no text"
        assert [entry.logprob for entry in completion.logprobs] == [float(-token) for token in ids]
        assert len(completion.origins) == len(ids)


@settings(max_examples=examples(4))
@given(
    tokens=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=14),
    stop=st.lists(st.sampled_from(["ab", "\n\n", "ba", "a\n", ".", "é c", "abab"]), max_size=3),
    max_tokens=st.integers(1, 14),
    min_tokens=st.integers(0, 14),
    ignore_eos=st.booleans(),
)
def test_answers_go_on_wherever_their_streams_broke_off(
    tokens: list[int], stop: list[str], max_tokens: int, min_tokens: int, ignore_eos: bool
) -> None:
    """Guards the seam: a stop string that begins before it, text that was held back, the first token that counts."""
    low = min(min_tokens, max_tokens)
    params = SamplingParams(max_tokens=max_tokens, min_tokens=low, stop=tuple(stop), ignore_eos=ignore_eos, seed=1)
    begun = answer_of(params)
    unbroken = pieces(begun, tokens)
    assert [piece.seed for piece in unbroken] == [1, *[None] * (len(unbroken) - 1)][: len(unbroken)]
    for cut in range(1, len(unbroken)):
        had = tuple(token for piece in unbroken[:cut] for token in piece.token_ids)
        answer = Answer(begun.spec.after(had), Words())
        assert (answer.delivered.text, answer.delivered.token_ids) == ("".join(piece.text for piece in unbroken[:cut]), had)
        assert (answer.finished, answer.rest(), answer.delivered.completion) == (False, None, None)
        rest = pieces(answer, tokens)
        for name in ("text", "token_ids", "origins"):
            joined, expected = (
                [entry for piece in chunks for entry in getattr(piece, name)] for chunks in (rest, unbroken[cut:])
            )
            assert joined == expected
        ended, other = rest[-1].completion, unbroken[-1].completion
        assert (ended is None) == (other is None)
        if ended is not None and other is not None:
            assert (ended.finish_reason, ended.stats.completion_tokens) == (other.finish_reason, other.stats.completion_tokens)
            assert ended.text == "".join(piece.text for piece in rest)


GRAMMARS: list[Structured] = []  # that were checked
CAPABLE = Capabilities(
    ("tiny", "full"),
    vocab_size=10,
    context_len=9,
    end_ids=frozenset([END]),
    adapters=("french",),
    check_grammar=lambda structured, output: GRAMMARS.append(structured),
    window=32,
    answer_window=256,
    max_tokens=8,
)


def test_what_is_admitted_is_what_was_asked() -> None:
    """Guards every word of a request on its way to the full tier, and the defaults of those that were not said."""
    CAPABLE.admit([1] * 8, SamplingParams(max_tokens=1))  # just fits
    assert not GRAMMARS
    params = SamplingParams(max_tokens=4, seed=7, stop_token_ids=(5,), adapter="french", structured=Structured(regex="a"))
    spec = CAPABLE.admit([1, 2], params, Speculation(window=3, branches=2), Handling(-2, "mine", True))
    assert [params.structured] == GRAMMARS
    assert spec == SessionSpec(
        (1, 2),
        2,
        params,
        ends=frozenset([END, 5]),
        tier="full",
        chain=("tiny",),
        window=256,
        draft_window=3,
        draft_branches=2,
        adaptive=True,
        priority=-2,
        cache_salt="mine",
    )
    plain = SamplingParams(max_tokens=4, ignore_eos=True)
    other = CAPABLE.admit([1, 2], plain)
    assert (other.ends, other.draft_window, other.adaptive, other.draft_branches) == (frozenset(), 32, True, MOST_BRANCHES)
    assert CAPABLE.admit([1], SamplingParams(max_tokens=1), Speculation(branches=0)).draft_branches == 0
    assert other.params == replace(plain, seed=other.params.seed)


SPEC = SessionSpec((1, 2), 2, SamplingParams(seed=1), tier="full", chain=("tiny",))


@pytest.mark.parametrize(
    ("chain", "edges", "why"),
    [
        ((), [Edge("", "full", 9)], "disabled"),
        (("tiny",), [Edge("", "full", 9)], "no_replica"),
        (("tiny",), [Edge("", "full", 9), Edge("tiny", "full", 2)], "no_replica"),
        (("tiny",), [Edge("tiny", "full", 1)], "short"),
        (("tiny",), [Edge("tiny", "full", 50), Edge("", "tiny", 50)], "late"),
        (("tiny",), [Edge("", "full", 9), Edge("tiny", "full", 2, 1)], None),
        (("medium", "tiny"), [Edge("medium", "full", 50), Edge("tiny", "medium", 50, 80)], "late"),
    ],
)
def test_why_nothing_was_drafted(chain: tuple[str, ...], edges: list[Edge], why: str | None) -> None:
    """Guards the reason: it is about guesses at the full tier, and one scored guess is enough to have none."""
    assert undrafted(replace(SPEC, chain=chain), edges) == why


def test_time_to_the_first_token_is_that_of_the_first() -> None:
    """Guards against a time that later tokens, or a session on another replica, move."""
    ticks = iter([0.5, 1.5])
    answer = Answer(replace(SPEC, params=SamplingParams(seed=1, max_tokens=2)), Words(), elapsed=lambda: next(ticks))
    answer.receive(Proposal("s", 2, Draft((1,), bytes(1))))
    chunk, _ = answer.receive(Proposal("s", 3, Draft((1,), bytes(1))))
    assert chunk.completion.stats.first_token_s == 0.5
