"""What crosses the wire: every message as it was, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.draft import Dist, Draft
from cascade.messages import Close, Commit, Edge, Failed, Lane, Logprobs, Message, Open, Proposal, Rules
from cascade.params import MAX_SEED, RULES, SamplingParams, Structured
from cascade.v1 import link_pb2 as pb
from deployments.links.codec import decode, encode

ids = st.integers(0, 2**32 - 1)
tokens = st.lists(ids, max_size=8).map(tuple)
counts = st.integers(0, 2**32 - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, MAX_SEED),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.just(False),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    structured=st.none()
    | st.builds(Structured, json_schema=st.text(min_size=1))
    | st.just(Structured(json_object=True))
    | st.builds(Structured, regex=st.text(min_size=1))
    | st.builds(Structured, choice=st.lists(st.text(min_size=1), min_size=1, max_size=3))
    | st.builds(Structured, grammar=st.text(min_size=1)),
)
positions, ranks = st.lists(counts, max_size=16).map(tuple), st.lists(counts, max_size=3).map(tuple)
edges = st.builds(
    Edge,
    st.text(),
    st.text(),
    counts,
    counts,
    counts,
    counts,
    st.floats(0, 1e9),
    positions,
    positions,
    ranks,
    ranks,
    counts,
    counts,
    counts,
)
parents = st.lists(st.integers(0, 99), max_size=8).map(lambda drawn: tuple(n % (node + 1) - 1 for node, n in enumerate(drawn)))
lanes = parents.flatmap(
    lambda shape: st.builds(
        Lane, st.text(), ids, st.lists(ids, min_size=len(shape), max_size=len(shape)).map(tuple), st.sampled_from(((), shape))
    )
)
opens = st.builds(
    Open,
    session=st.text(),
    tokens=st.lists(ids, min_size=3, max_size=8).map(tuple),
    prompt_len=st.integers(1, 3),
    params=params,
    ends=st.frozensets(ids, max_size=4),
    tier=st.text(),
    chain=st.lists(st.text(), max_size=4).map(tuple),
    window=counts,
    draft_window=counts,
    lockstep=st.booleans(),
    priority=st.integers(-1000, 1000),
    cache_salt=st.text(),
    adaptive=st.booleans(),
    watch=st.booleans(),
    branches=counts,
    draft_branches=counts,
    rules=st.builds(Rules, st.sampled_from(RULES), st.sampled_from(RULES), counts, counts),
    traceparent=st.text(),
    tracestate=st.text(),
)
probabilities = st.lists(st.tuples(ids, st.floats(0, 1, width=32, exclude_min=True)), max_size=3)
dists = probabilities.map(lambda pairs: Dist(tuple(id for id, _ in pairs), tuple(prob for _, prob in pairs)))
values = st.floats(-1e6, 0, width=32)
logprobs = st.builds(Logprobs, values, st.lists(st.tuples(ids, values), max_size=3).map(tuple))
proposals = st.integers(0, 8).flatmap(
    lambda length: st.builds(
        Proposal,
        st.text(),
        ids,
        st.builds(
            Draft,
            st.lists(ids, min_size=length, max_size=length).map(tuple),
            st.binary(min_size=length, max_size=length),
            dists=st.just(()) | st.lists(dists, min_size=length, max_size=length).map(tuple),
        ),
        st.lists(edges, max_size=3).map(tuple),
        st.just(()) | st.lists(logprobs, min_size=length, max_size=length).map(tuple),
        st.text(),
        st.lists(logprobs, max_size=3).map(tuple),
        st.lists(lanes, max_size=3).map(tuple),
    )
)
messages = st.one_of(
    opens,
    st.builds(Commit, st.text(), ids, tokens),
    st.builds(Close, st.text()),
    proposals,
    st.builds(Failed, st.text(), st.text(), st.text()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(messages, max_size=5))
def test_codec_keeps_every_message(batch: list[Message]) -> None:
    """Guards against fields that the wire forgets, swaps or rounds."""
    arrived = decode(pb.Batch.FromString(encode(batch).SerializeToString()))
    assert arrived == batch
    for name in ("edges", "logprobs", "prompt_logprobs", "lanes"):  # which equality leaves out
        said = [[getattr(m, name) for m in some if isinstance(m, Proposal)] for some in (arrived, batch)]
        assert said[0] == said[1]
    drawn = [[dist.listed for m in some if isinstance(m, Proposal) for dist in m.draft.dists] for some in (arrived, batch)]
    assert drawn[0] == drawn[1]


def test_distributions_cross_processes_as_numbers() -> None:
    """Guards the wire against tensors, whose memory is the whole pass's, and against tokens without a chance."""
    passes = torch.arange(8.0).reshape(2, 4) / 22
    dist = Dist(torch.tensor([7, 5, 6, 2]), passes[0])
    [sent] = encode([Proposal("s", 1, Draft((5,), bytes(1), dists=(dist,)))]).messages[0].proposal.dists
    assert (list(sent.ids), list(sent.probs)) == ([5, 6, 2], passes[0, 1:].tolist())


@pytest.mark.parametrize(
    "wrong",
    [
        pb.Message(open=pb.Open(tokens=[1], prompt_len=1, rules=pb.Rules(rule="lucky", above="coupled"))),
        pb.Message(proposal=pb.Proposal(tokens=[1, 2], origins=bytes(2), dists=[pb.Dist()])),
        pb.Message(proposal=pb.Proposal(tokens=[1, 2], origins=bytes(2), parents=[0, 0], dists=[pb.Dist(), pb.Dist()])),
        pb.Message(proposal=pb.Proposal(tokens=[1], origins=bytes(1), dists=[pb.Dist(ids=[1])])),
    ],
)
def test_rules_and_distributions_that_make_no_sense_are_refused(wrong: pb.Message) -> None:
    """Guards a tier against passes that fail for what its neighbour says."""
    with pytest.raises(ValueError, match=r"rule|distribution"):
        decode(pb.Batch(messages=[wrong]))


def test_every_kind_has_its_strategy() -> None:
    """Guards the test above against kinds that are added later."""
    kinds = pb.Message.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert {field.name for field in kinds} == {kind.__name__.lower() for kind in (Open, Commit, Close, Proposal, Failed)}
