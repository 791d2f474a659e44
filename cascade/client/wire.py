"""Sampling parameters, guesses and what became of them to and from the protocol, for clients, routers and links alike."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cascade.messages import MAX_POSITIONS, MAX_RANKS, Edge, Lane
from cascade.params import SamplingParams, Speculation, Structured
from cascade.v1 import link_pb2
from cascade.v1 import serving_pb2 as pb

CONVERTED = ("stop", "stop_token_ids", "logit_bias", "structured")  # fields of `SamplingParams` of another type in the protocol
SAME_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in CONVERTED)
EDGE_COUNTS = {  # fields of `Edge` and `pb.Edge` that are lists, each with as many numbers as it has at most
    "accepted_by_position": MAX_POSITIONS,
    "proposed_by_position": MAX_POSITIONS,
    "accepted_by_rank": MAX_RANKS,
    "proposed_by_rank": MAX_RANKS,
}
EDGE_TOTALS = tuple(field.name for field in fields(Edge) if field.name not in EDGE_COUNTS)


def encode_lane(lane: Lane) -> pb.Lane:
    """Guesses of a tier on the wire."""
    return pb.Lane(tier=lane.tier, start=lane.start, tokens=lane.tokens, parents=[parent + 1 for parent in lane.parents])


def decode_lane(lane: pb.Lane) -> Lane:
    """Guesses of a tier from the wire; raises `ValueError` if they are no tree."""
    return Lane(lane.tier, lane.start, tuple(lane.tokens), decode_parents(lane.parents, len(lane.tokens)))


def decode_parents(said: Sequence[int], size: int) -> tuple[int, ...]:
    """Parents of so many nodes from the wire; raises `ValueError` if they are no tree."""
    parents = tuple(parent - 1 for parent in said)
    if len(parents) not in (0, size) or any(parent >= node for node, parent in enumerate(parents)):
        raise ValueError("guesses have one parent a token, each before it, or none at all")
    return parents


def encode_edge(edge: Edge) -> dict[str, Any]:
    """Fields of `pb.Edge` and `LinkEdge`."""
    return {name: getattr(edge, name) for name in (*EDGE_TOTALS, *EDGE_COUNTS)}


def decode_edge(edge: pb.Edge | link_pb2.LinkEdge) -> Edge:
    """What happened between two tiers, from the wire."""
    totals: dict[str, Any] = {name: getattr(edge, name) for name in EDGE_TOTALS}
    counts: dict[str, Any] = {name: tuple(getattr(edge, name)[:most]) for name, most in EDGE_COUNTS.items()}
    return Edge(**totals, **counts)


def encode_sampling(params: SamplingParams) -> pb.Sampling:
    """All of ``params``; raises `ValueError` for what the protocol cannot say."""
    return pb.Sampling(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=dict(params.biases),
        structured=None if params.structured is None else encode_structured(params.structured),
        **{name: getattr(params, name) for name in SAME_FIELDS},
    )


def decode_sampling(sampling: pb.Sampling) -> SamplingParams:
    """Sampling parameters, with defaults for what is not set; raises `InvalidRequest`."""
    chosen: dict[str, Any] = {name: getattr(sampling, name) for name in SAME_FIELDS if sampling.HasField(name)}
    return SamplingParams(
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        logit_bias=dict(sampling.logit_bias),
        structured=decode_structured(sampling.structured) if sampling.HasField("structured") else None,
        **chosen,
    )


def encode_speculation(speculation: Speculation) -> pb.Speculation:
    """How drafts may be used; raises `ValueError` for what the protocol cannot say."""
    mode = "off" if speculation.tiers == () else speculation.mode
    return pb.Speculation(
        mode=mode,
        tiers=speculation.tiers or (),
        window=speculation.window,
        schedule=speculation.schedule,
        branches=speculation.branches,
        draft_top_k=speculation.draft_top_k,
        rule=None if speculation.rule == "coupled" else speculation.rule,  # which older servers do not know
    )


def encode_structured(structured: Structured) -> pb.Structured:
    """What a text has to be, on the wire."""
    if structured.choice:
        return pb.Structured(choice=pb.Choice(texts=structured.choice))
    return pb.Structured(**{structured.kind: getattr(structured, structured.kind)})


def decode_structured(structured: pb.Structured) -> Structured:
    """What a text has to be; raises `InvalidRequest` if no kind is set."""
    kind = structured.WhichOneof("kind")
    if kind is None:
        return Structured()
    value = getattr(structured, kind)
    chosen: dict[str, Any] = {kind: tuple(value.texts) if kind == "choice" else value}
    return Structured(**chosen)
