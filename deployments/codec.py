"""Messages of a link to and from the wire."""

from collections.abc import Iterable

from cascade.messages import Close, Commit, Edge, Failed, Message, Open, Proposal
from cascade.params import SamplingParams
from cascade.v1 import link_pb2 as pb


def encode(messages: Iterable[Message]) -> pb.Batch:
    """All messages as one batch."""
    return pb.Batch(messages=[_encode(message) for message in messages])


def decode(batch: pb.Batch) -> list[Message]:
    """The messages of a batch; raises `ValueError` if one is malformed."""
    return [_decode(message) for message in batch.messages]


def _encode(message: Message) -> pb.Message:
    session = message.session
    match message:
        case Commit(_, start, tokens):
            return pb.Message(session=session, commit=pb.Commit(start=start, tokens=tokens))
        case Proposal(_, start, tokens, origins, edges):
            sent = [_encode_edge(edge) for edge in edges]
            return pb.Message(session=session, proposal=pb.Proposal(start=start, tokens=tokens, origins=origins, edges=sent))
        case Close():
            return pb.Message(session=session, close=pb.Close())
        case Failed(_, reason, tier):
            return pb.Message(session=session, failed=pb.Failed(reason=reason, tier=tier))
        case Open():
            return pb.Message(session=session, open=_encode_open(message))


def _encode_open(opening: Open) -> pb.Open:
    params = opening.params
    sampling = pb.LinkSampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        adapter=params.adapter,
    )
    return pb.Open(
        tokens=opening.tokens,
        prompt_len=opening.prompt_len,
        sampling=sampling,
        ends=sorted(opening.ends),
        tier=opening.tier,
        chain=opening.chain,
        window=opening.window,
        draft_window=opening.draft_window,
        lockstep=opening.lockstep,
        priority=opening.priority,
        cache_salt=opening.cache_salt,
    )


def _encode_edge(edge: Edge) -> pb.LinkEdge:
    return pb.LinkEdge(
        drafter=edge.drafter,
        verifier=edge.verifier,
        passes=edge.passes,
        proposed=edge.proposed,
        accepted=edge.accepted,
        emitted=edge.emitted,
        waited_s=edge.waited_s,
    )


def _decode(message: pb.Message) -> Message:
    session = message.session
    match message.WhichOneof("kind"):
        case "commit":
            return Commit(session, message.commit.start, tuple(message.commit.tokens))
        case "proposal":
            said = message.proposal
            if len(said.origins) != len(said.tokens):
                raise ValueError("a proposal has one origin a token")
            return Proposal(session, said.start, tuple(said.tokens), said.origins, tuple(map(_decode_edge, said.edges)))
        case "close":
            return Close(session)
        case "failed":
            return Failed(session, message.failed.reason, message.failed.tier)
        case "open":
            return _decode_open(session, message.open)
    raise ValueError("a message has no kind")


def _decode_open(session: str, opening: pb.Open) -> Open:
    sampling = opening.sampling
    if not 0 < opening.prompt_len <= len(opening.tokens):
        raise ValueError("a text begins with its prompt")
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        adapter=sampling.adapter,
    )
    return Open(
        session=session,
        tokens=tuple(opening.tokens),
        prompt_len=opening.prompt_len,
        params=params,
        ends=frozenset(opening.ends),
        tier=opening.tier,
        chain=tuple(opening.chain),
        window=opening.window,
        draft_window=opening.draft_window,
        lockstep=opening.lockstep,
        priority=opening.priority,
        cache_salt=opening.cache_salt,
    )


def _decode_edge(edge: pb.LinkEdge) -> Edge:
    return Edge(edge.drafter, edge.verifier, edge.passes, edge.proposed, edge.accepted, edge.emitted, edge.waited_s)
