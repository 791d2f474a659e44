"""What crosses the wire: every message as it was, or refused."""

from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.draft import Draft
from cascade.messages import Close, Commit, Edge, Failed, Logprobs, Message, Open, Proposal, Routing, SessionSpec
from cascade.params import MAX_SEED, SamplingParams, Structured
from cascade.v1 import link_pb2 as pb
from deployments.links.codec import decode, encode

ids = st.integers(0, 2**32 - 1)
OF_TYPE = {  # values of fields, by what these are annotated with
    str: st.text(),
    int: ids,
    float: st.floats(0, 1e9),
    bool: st.booleans(),
    tuple[int, ...]: st.lists(ids, max_size=8).map(tuple),
    list[int]: st.lists(ids, max_size=8),
    tuple[str, ...]: st.lists(st.text(), max_size=4).map(tuple),
    frozenset[int]: st.frozensets(ids, max_size=4),
}


def some(kind: type[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any value of a dataclass: all its fields, those that are added later, too."""
    values = {name: OF_TYPE[hint] for name, hint in get_type_hints(kind).items() if name not in special}
    return st.builds(kind, **values, **special)


def several(values: st.SearchStrategy[Any], size: int | None = None) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=size or 0, max_size=3 if size is None else size).map(tuple)


positive = st.integers(0, 2**31 - 1)
params = some(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 100),
    top_k=positive,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, MAX_SEED),
    stop=st.just(()),
    stop_token_ids=several(positive),
    ignore_eos=st.just(False),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(positive, st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    structured=st.none()
    | st.just(Structured(json_object=True))
    | st.builds(Structured, choice=st.lists(st.text(min_size=1), min_size=1, max_size=3))
    | st.one_of(st.builds(Structured, **{kind: st.text(min_size=1)}) for kind in ("json_schema", "regex", "grammar")),
)
texts = st.lists(ids, min_size=3, max_size=8).map(tuple)
specs = some(SessionSpec, tokens=texts, prompt_len=st.integers(1, 3), params=params, priority=st.integers(-1000, 1000))
routings = some(Routing, affinity=st.just(""), train=st.just(True))  # these two stay at the router
opens = st.builds(Open, st.text(), specs, routings)
values = st.floats(-1e6, 0, width=32)
parents = st.lists(st.integers(0, 99), max_size=8).map(lambda drawn: tuple(n % (node + 1) - 1 for node, n in enumerate(drawn)))
byte = st.integers(0, 255)
drafts = parents.flatmap(
    lambda tree: st.builds(
        Draft, several(ids, len(tree)), several(byte, len(tree)).map(bytes), parents=st.sampled_from(((), tree))
    )
)
logprobs = st.builds(Logprobs, values, several(st.tuples(ids, values)))
others = {"edges": several(some(Edge)), "prompt_logprobs": several(logprobs)}
proposals = drafts.flatmap(
    lambda draft: some(Proposal, draft=st.just(draft), logprobs=st.just(()) | several(logprobs, len(draft)), **others)
)
messages = st.one_of(opens, some(Commit), some(Close), proposals, some(Failed))


@given(st.lists(messages, max_size=5))
def test_codec_keeps_every_message(batch: list[Message]) -> None:
    """Guards against fields that the wire forgets, swaps or rounds."""
    arrived = decode(pb.Batch.FromString(encode(batch).SerializeToString()))
    assert arrived == batch
    trees = [(m.draft, sent.proposal) for m, sent in zip(batch, encode(batch).messages, strict=True) if isinstance(m, Proposal)]
    assert all(len(sent.parents) == len(draft) * (not draft.is_line) for draft, sent in trees), "a line costs no byte"
    for name in ("edges", "logprobs", "prompt_logprobs", "skip_reason", "cached", "rests"):  # which equality leaves out
        values = [[getattr(m, name) for m in some if isinstance(m, Proposal)] for some in (arrived, batch)]
        assert values[0] == values[1]


SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 1, "repetition_penalty": 1.0, "seed": 1}


def opened(**changes: Any) -> pb.Message:
    """A message that opens a session, spoilt."""
    return pb.Message(open=pb.Open(**{"tokens": [1], "prompt_len": 1, "sampling": SAMPLING} | changes))


def sampled(**changes: Any) -> pb.Message:
    return opened(sampling=SAMPLING | changes)


def proposed(**fields: Any) -> pb.Message:
    return pb.Message(proposal=pb.Proposal(**{"tokens": [1, 2], "origins": bytes(2)} | fields))


WRONG = {
    "no kind": pb.Message(session="s"),
    "prompt_len 0": opened(prompt_len=0),
    "prompt_len beyond the text": opened(prompt_len=99),
    "no tokens": opened(tokens=[]),
    "no sampling": opened(sampling=None),
    "NaN temperature": sampled(temperature=float("nan")),
    "infinite temperature": sampled(temperature=float("inf")),
    "top_p 0": sampled(top_p=0.0),
    "max_tokens 0": sampled(max_tokens=0),
    "seed too large": sampled(seed=2**64 - 1),
    "no seed": sampled(seed=None),
    "origins of another length": proposed(origins=bytes(1)),
    "confidences of another length": proposed(confidences=bytes(1)),
    "parents of another number": proposed(parents=[0]),
    "a parent that comes later": proposed(parents=[0, 5]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_refused(wrong: pb.Message) -> None:
    """Guards a tier against passes that fail for what its neighbour says; one thing is wrong at a time."""
    decode(pb.Batch(messages=[opened(), proposed()]))
    with pytest.raises(ValueError, match=r"."):
        decode(pb.Batch(messages=[wrong]))


def test_every_kind_has_its_strategy() -> None:
    """Guards the test above against kinds that are added later."""
    kinds = pb.Message.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert {field.name for field in kinds} == {kind.__name__.lower() for kind in (Open, Commit, Close, Proposal, Failed)}
