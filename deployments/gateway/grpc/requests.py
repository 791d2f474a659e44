"""From messages of the client's protocol to the library's parameters, and from its pieces of an answer back."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from cascade.answer import Chunk, Completion
from cascade.client.wire import decode_sampling, encode_edge, encode_lane
from cascade.errors import InvalidRequest
from cascade.messages import origin_corrected, origin_level
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb
from deployments.gateway.chat.reader import ending

Asked: TypeAlias = pb.GenerateRequest | pb.ChatRequest


def parse_input(request: pb.GenerateRequest) -> str | list[int]:
    """The prompt, as text or token ids; raises `InvalidRequest`."""
    refuse_unknown(request, "the request")
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("The request has neither prompt nor token_ids: set one of them")
    if kind == "token_ids":
        refuse_unknown(request.token_ids, "token_ids")
        return list(request.token_ids.ids)
    return request.prompt


def parse_sampling(request: Asked, room: int | None = None) -> SamplingParams:
    """Sampling parameters, defaults where nothing is set, ``room`` that of ``max_tokens``; raises `InvalidRequest`."""
    sampling = request.sampling
    refuse_unknown(sampling, "sampling")
    refuse_unknown(sampling.structured, "structured")
    if room is None or sampling.HasField("max_tokens"):
        return decode_sampling(sampling)
    roomy = pb.Sampling(max_tokens=room)
    roomy.MergeFrom(sampling)
    return decode_sampling(roomy)


def parse_speculation(request: Asked) -> Speculation:
    """How drafts may be used for it; raises `InvalidRequest`."""
    speculation = request.speculation
    refuse_unknown(speculation, "speculation")
    names = ("mode", "window", "schedule", "branches", "rule", "draft_top_k")
    chosen: dict[str, Any] = {name: getattr(speculation, name) for name in names if speculation.HasField(name)}
    return Speculation(tiers=tuple(speculation.tiers) or None, **chosen)


def parse_handling(request: Asked) -> Handling:
    """How it is treated beside others; raises `InvalidRequest`."""
    train = request.train if request.HasField("train") else True
    return Handling(request.priority, request.cache_salt, request.watch, train)


def parse_known(request: Asked) -> Sequence[int]:
    """Tokens that the client has of the answer; raises `InvalidRequest`."""
    refuse_unknown(request.resume, "resume")
    return request.resume.token_ids


def refuse_streaming(request: Asked, rpc: str) -> None:
    """Raise `InvalidRequest` if a request for a whole answer wants what streams alone have; ``rpc`` has it."""
    if request.watch:
        raise InvalidRequest(f"watch is true: only streams tell of guesses, so ask for {rpc}")
    if request.HasField("resume"):
        raise InvalidRequest(f"resume is set: only streams go on where they broke off, so ask for {rpc}")


def refuse_unknown(message: ProtoMessage, where: str) -> None:
    """A parameter is honoured or refused: raises `InvalidRequest` if there are fields that this version does not know."""
    unknown = [field.field_number for field in UnknownFieldSet(message)]  # type: ignore[attr-defined]
    if unknown:
        numbers = ", ".join(map(str, unknown))
        raise InvalidRequest(f"There are unknown fields in {where} (numbers {numbers}): is the client newer than the server?")


def tokens(chunk: Chunk, num_chars: int = 0) -> list[pb.Token]:
    """Tokens of a piece with their history; ``num_chars`` come before it in the message's text."""
    tokens = [
        pb.Token(id=id, level=origin_level(byte), corrected=origin_corrected(byte), end=num_chars + end)
        for id, byte, end in zip(chunk.token_ids, chunk.origins, chunk.ends, strict=True)
    ]
    if chunk.logprobs:
        for token, said in zip(tokens, chunk.logprobs, strict=True):
            token.logprob = said.logprob
            token.top.extend(pb.TopToken(id=id, logprob=value) for id, value in said.top)
    return tokens


def all_tokens(chunks: Iterable[Chunk]) -> Iterator[pb.Token]:
    """Tokens of all pieces of an answer."""
    num_chars = 0
    for chunk in chunks:
        yield from tokens(chunk, num_chars)
        num_chars += len(chunk.text)


def prompt(chunk: Chunk) -> list[pb.PromptToken]:
    """Tokens of the prompt, with the first piece if they were asked for."""
    return [
        pb.PromptToken(id=one.id, logprob=one.logprob, top=[pb.TopToken(id=id, logprob=value) for id, value in one.top])
        for one in chunk.prompt
    ]


def response(chunk: Chunk) -> pb.GenerateResponse:
    """One piece of an answer."""
    return pb.GenerateResponse(
        text=chunk.text,
        tokens=tokens(chunk),
        finish=None if chunk.completion is None else finish(chunk.completion),
        prompt=prompt(chunk),
        lanes=map(encode_lane, chunk.lanes),
        seed=chunk.seed,
    )


def whole(chunks: Sequence[Chunk]) -> pb.CompleteResponse:
    """The answer of these pieces."""
    end = ending(chunks)
    return pb.CompleteResponse(text=end.text, tokens=all_tokens(chunks), finish=finish(end), prompt=prompt(chunks[0]))


def finish(completion: Completion, reason: str | None = None) -> pb.Finish:
    """How the answer ended, with the last message; ``reason`` overrules the completion's own."""
    edges = [pb.Edge(**encode_edge(edge), mean_accepted_len=edge.mean_accepted_len) for edge in completion.stats.edges]
    return pb.Finish(
        reason=reason or completion.finish_reason,
        seed=completion.seed,
        prompt_tokens=completion.stats.prompt_tokens,
        completion_tokens=completion.stats.completion_tokens,
        edges=edges,
        first_token_s=completion.stats.first_token_s,
        undrafted=completion.stats.undrafted,
        rule=completion.stats.rule,
        cached_tokens=completion.stats.cached_tokens,
        stop_string=completion.stop_string,
    )
