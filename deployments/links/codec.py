"""Messages of a link to and from the wire."""

from collections.abc import Iterable
from dataclasses import fields, replace

from google.protobuf.unknown_fields import UnknownFieldSet

from cascade.client import wire
from cascade.draft import Draft
from cascade.messages import Close, Commit, Failed, Logprobs, Message, Open, Proposal, Routing, SessionSpec
from cascade.v1 import link_pb2 as pb
from cascade.v1 import serving_pb2

# fields with the same name in the protocol; a new one needs no code here, unless it is a message of its own
OF_SPEC, OF_ROUTING = (
    tuple(field.name for field in fields(kind) if field.name in pb.Open.DESCRIPTOR.fields_by_name)
    for kind in (SessionSpec, Routing)
)
LISTS = tuple(name for name in OF_SPEC if pb.Open.DESCRIPTOR.fields_by_name[name].is_repeated)


def encode(messages: Iterable[Message]) -> pb.Batch:
    """All messages as one batch."""
    return pb.Batch(messages=[_encode(message) for message in messages])


def decode(batch: pb.Batch) -> list[Message]:
    """The messages of a batch; raises `ValueError` if one is malformed."""
    return [_decode(message) for message in batch.messages]


def _encode(message: Message) -> pb.Message:
    session = message.session
    match message:
        case Commit(_, start, tokens, least_chance, most):
            commit = pb.Commit(start=start, tokens=tokens, least_chance=least_chance, most=most)
            return pb.Message(session=session, commit=commit)
        case Proposal():
            return pb.Message(session=session, proposal=_encode_proposal(message))
        case Close(_, keep):
            return pb.Message(session=session, close=pb.Close(keep=keep))
        case Failed(_, reason, tier, fault):
            return pb.Message(session=session, failed=pb.Failed(reason=reason, tier=tier, fault=fault))
        case Open(_, spec, routing):
            same = {name: getattr(spec, name) for name in OF_SPEC} | {name: getattr(routing, name) for name in OF_ROUTING}
            sampling = wire.encode_sampling(replace(spec.params, stop=()))
            return pb.Message(session=session, open=pb.Open(sampling=sampling, **same))


def _encode_proposal(proposal: Proposal) -> pb.Proposal:
    draft = proposal.draft
    return pb.Proposal(
        start=proposal.start,
        tokens=draft.tokens,
        origins=draft.origins,
        confidences=draft.confidences,
        parents=[parent + 1 for parent in draft.parents],
        edges=(serving_pb2.Edge(**wire.encode_edge(edge)) for edge in proposal.edges),
        logprobs=map(_encode_logprobs, proposal.logprobs),
        prompt_logprobs=map(_encode_logprobs, proposal.prompt_logprobs),
        skip_reason=proposal.skip_reason,
        cached=proposal.cached,
        rests=proposal.rests,
    )


def _encode_logprobs(logprobs: Logprobs) -> pb.LinkLogprobs:
    return pb.LinkLogprobs(
        logprob=logprobs.logprob, top_ids=[id for id, _ in logprobs.top], top=[value for _, value in logprobs.top]
    )


def _decode(message: pb.Message) -> Message:
    session = message.session
    match message.WhichOneof("kind"):
        case "commit":
            commit = message.commit
            return Commit(session, commit.start, tuple(commit.tokens), commit.least_chance, commit.most)
        case "proposal":
            return _decode_proposal(session, message.proposal)
        case "close":
            return Close(session, message.close.keep)
        case "failed":
            return Failed(session, message.failed.reason, message.failed.tier, message.failed.fault)
        case "open":
            return _decode_open(session, message.open)
    raise ValueError("a message has no kind")


def _decode_open(session: str, opening: pb.Open) -> Open | Failed:
    """The session to begin, or `Failed` if it needs a feature of newer versions, so that another replica may serve it."""
    if not 0 < opening.prompt_len <= len(opening.tokens):
        raise ValueError("a text begins with its prompt")
    if not opening.sampling.HasField("seed"):
        raise ValueError("every tier must know the seed")
    if len(UnknownFieldSet(opening.sampling)):
        return Failed(session, "the request has parameters that this replica does not know: it is older than the router")
    plain = {name: getattr(opening, name) for name in OF_SPEC}
    plain |= {name: tuple(plain[name]) for name in LISTS} | {"ends": frozenset(opening.ends)}
    spec = SessionSpec(params=wire.decode_sampling(opening.sampling), **plain)
    return Open(session, spec, Routing(**{name: getattr(opening, name) for name in OF_ROUTING}))


def _decode_proposal(session: str, sent: pb.Proposal) -> Proposal:
    if sent.logprobs and len(sent.logprobs) != len(sent.tokens):
        raise ValueError("a proposal has log-probabilities for all tokens or for none")
    logprobs, prompt = tuple(map(_decode_logprobs, sent.logprobs)), tuple(map(_decode_logprobs, sent.prompt_logprobs))
    edges = tuple(map(wire.decode_edge, sent.edges))
    draft = _decode_draft(sent)
    return Proposal(session, sent.start, draft, edges, logprobs, sent.skip_reason, prompt, sent.cached, sent.rests)


def _decode_draft(sent: pb.Proposal) -> Draft:
    size = len(sent.tokens)
    if len(sent.origins) != size:
        raise ValueError("a proposal has one origin a token")
    if len(sent.confidences) not in (0, size):
        raise ValueError("a proposal has one confidence a token, or none at all")
    parents = tuple(parent - 1 for parent in sent.parents)
    if len(parents) not in (0, size) or any(parent >= node for node, parent in enumerate(parents)):
        raise ValueError("guesses have one parent a token, each before it, or none at all")
    return Draft(tuple(sent.tokens), sent.origins, sent.confidences, parents)


def _decode_logprobs(sent: pb.LinkLogprobs) -> Logprobs:
    return Logprobs(sent.logprob, tuple(zip(sent.top_ids, sent.top, strict=True)))
