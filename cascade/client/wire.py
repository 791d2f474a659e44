"""Converts the library's values to and from messages, for clients, routers and links.

A parameter with the same name and type in `cascade.params` and in the protocol needs no code here.
"""

from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from cascade.messages import MAX_POSITIONS, Edge
from cascade.params import Handling, SamplingParams, Speculation, Structured
from cascade.v1 import serving_pb2 as pb

Kind = TypeVar("Kind", bound=ProtoMessage)
EDGE = tuple(field.name for field in fields(Edge))
HANDLING = tuple(field.name for field in fields(Handling))


def values(message: ProtoMessage, names: Collection[str] | None = None) -> dict[str, Any]:
    """Fields of a message, or only ``names``: lists as tuples, maps as dictionaries; without unset optional fields."""
    decoded: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if (names is not None and field.name not in names) or (field.has_presence and not message.HasField(field.name)):
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            value = dict(value) if is_map else tuple(value)
        decoded[field.name] = value
    return decoded


def message(kind: type[Kind], **given: Any) -> Kind:
    """A message of these fields; raises `ValueError`, with the field's name, for values that the protocol cannot carry."""
    try:
        return kind(**given)
    except (ValueError, TypeError):  # which names no field
        for name, value in given.items():
            try:
                kind(**{name: value})
            except (ValueError, TypeError) as error:
                raise ValueError(f"{name}: {error}") from None
        raise


def encode_sampling(params: SamplingParams) -> pb.Sampling:
    """``params`` as a message; raises `ValueError` for values that the protocol cannot carry."""
    same = {field.name: getattr(params, field.name) for field in fields(params)} | {"logit_bias": dict(params.biases)}
    if (structured := params.structured) is not None:
        value: Any = getattr(structured, structured.kind)
        if structured.kind == "choice":
            value = pb.Choice(texts=value)
        same["structured"] = pb.Structured(**{structured.kind: value})
    return message(pb.Sampling, **same)


def decode_sampling(sampling: pb.Sampling) -> SamplingParams:
    """Sampling parameters, with defaults for unset fields; raises `InvalidRequest`."""
    given = values(sampling)
    if "structured" in given:
        kinds = values(sampling.structured)
        if "choice" in kinds:
            kinds["choice"] = tuple(sampling.structured.choice.texts)
        given["structured"] = Structured(**kinds)
    return SamplingParams(**given)


def encode_speculation(speculation: Speculation) -> pb.Speculation:
    """``speculation`` as a message; an empty list of tiers becomes the mode "off". Raises `ValueError`."""
    mode = "off" if speculation.tiers == () else speculation.mode
    return pb.Speculation(**asdict(speculation) | {"mode": mode, "tiers": speculation.tiers or ()})


def decode_speculation(speculation: pb.Speculation) -> Speculation:
    """How drafts may be used; raises `InvalidRequest`."""
    return Speculation(**values(speculation) | {"tiers": tuple(speculation.tiers) or None})


def decode_handling(request: pb.GenerateRequest | pb.ChatRequest) -> Handling:
    """How the request is handled among others; raises `InvalidRequest`."""
    return Handling(**values(request, HANDLING))


def encode_edge(edge: Edge) -> dict[str, Any]:
    """Fields of `pb.Edge`."""
    return {name: getattr(edge, name) for name in EDGE}


def decode_edge(edge: pb.Edge) -> Edge:
    """An edge from a message; lists are cut to the number of entries that are counted."""
    given: dict[str, Any] = {name: getattr(edge, name) for name in EDGE}
    lists = {name: list(value)[:MAX_POSITIONS] for name, value in given.items() if name.endswith(("_by_position", "_by_rank"))}
    return Edge(**given | lists)
