"""Sampling parameters and guesses to and from the protocol, for clients, routers and links alike."""

from typing import Any

from cascade.messages import Lane
from cascade.params import SamplingParams, Speculation, Structured
from cascade.v1 import serving_pb2 as pb

SAME_FIELDS = (  # of `SamplingParams`, with the same name and type in `pb.Sampling`
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "adapter",
)


def encode_lane(lane: Lane) -> pb.Lane:
    """Guesses of a tier on the wire."""
    return pb.Lane(tier=lane.tier, start=lane.start, tokens=lane.tokens)


def decode_lane(lane: pb.Lane) -> Lane:
    """Guesses of a tier from the wire."""
    return Lane(lane.tier, lane.start, tuple(lane.tokens))


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
    return pb.Speculation(mode=mode, tiers=speculation.tiers or (), window=speculation.window, schedule=speculation.schedule)


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
