"""What a server says, in the library's words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from cascade.answer import Chunk, Completion, FinishReason, PromptToken, Stats, Undrafted
from cascade.client.wire import decode_lane
from cascade.errors import Unavailable
from cascade.messages import Edge, Logprobs, origin
from cascade.v1 import serving_pb2 as pb

REASONS: tuple[Undrafted, ...] = get_args(Undrafted)


@dataclass(frozen=True, slots=True)
class TierInfo:
    """One tier of a server; ``sessions`` are those of the replica that answered."""

    name: str
    model: str
    replicas: int
    sessions: int
    context_len: int
    vocab_size: int
    parameters: int
    device: str
    pass_cost: tuple[tuple[int, float], ...] = ()  # tokens, seconds; the points of a `cascade.simulation.scenario.PassCost`
    context_s: float = 0.0  # added to a pass for each position that its sessions hold
    dtype: str = ""  # of its weights
    same_bits: bool | None = None  # of a text's logits in every pass; None if the server does not say


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server serves; tiers bottom to top."""

    tiers: tuple[TierInfo, ...]
    max_model_len: int
    window: int
    version: str


class Pieces:
    """Turns responses of a stream into chunks, the last of which brings the completion."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens: list[pb.Token] = []
        self._prompt: list[pb.PromptToken] = []
        self._complete = False

    def check(self) -> None:
        """Raise `Unavailable` if the stream has ended before its text."""
        if not self._complete:
            raise Unavailable("The server ended the stream before the text was complete")

    def take(self, response: pb.GenerateResponse | pb.ChatResponse, text: str | None = None) -> Chunk:
        """One more response; ``text`` is what it brings, if that is not its own."""
        text = response.text if text is None else text
        self._text.append(text)
        self._tokens += response.tokens
        self._prompt += response.prompt
        completion = None
        if response.HasField("finish"):
            completion = completion_of("".join(self._text), self._tokens, response.finish, self._prompt)
            self._complete = True
        ids = tuple(token.id for token in response.tokens)
        ends = tuple(token.end for token in response.tokens)
        origins, logprobs = _origins(response.tokens), _logprobs(response.tokens)
        prompt, lanes = _prompt(response.prompt), tuple(map(decode_lane, response.lanes))
        return Chunk(text, ids, ends, origins, completion, logprobs=logprobs, prompt=prompt, lanes=lanes)


def completion_of(text: str, tokens: Sequence[pb.Token], finish: pb.Finish, prompt: Sequence[pb.PromptToken]) -> Completion:
    edges = tuple(map(_edge, finish.edges))
    reason: FinishReason = "length" if finish.reason == "length" else "stop"
    first_token_s = finish.first_token_s if finish.HasField("first_token_s") else None
    why = next((why for why in REASONS if why == finish.undrafted), None)  # a newer server may know more
    stats = Stats(finish.prompt_tokens, finish.completion_tokens, edges, first_token_s, why)
    ids, origins, logprobs = tuple(token.id for token in tokens), _origins(tokens), _logprobs(tokens)
    return Completion(text, ids, reason, finish.seed, stats, origins, logprobs=logprobs, prompt=_prompt(prompt))


def _edge(e: pb.Edge) -> Edge:
    positions = tuple(e.accepted_by_position)
    return Edge(e.drafter, e.verifier, e.passes, e.proposed, e.accepted, e.emitted, e.waited_s, positions)


def _origins(tokens: Sequence[pb.Token]) -> bytes:
    return bytes(origin(token.level, token.corrected) for token in tokens)


def _prompt(tokens: Sequence[pb.PromptToken]) -> tuple[PromptToken, ...]:
    return tuple(
        PromptToken(one.id, one.logprob if one.HasField("logprob") else None, tuple((top.id, top.logprob) for top in one.top))
        for one in tokens
    )


def _logprobs(tokens: Sequence[pb.Token]) -> tuple[Logprobs, ...]:
    """One a token if the request asked for them."""
    said = [token for token in tokens if token.HasField("logprob")]
    return tuple(Logprobs(token.logprob, tuple((top.id, top.logprob) for top in token.top)) for token in said)


def server_info(response: pb.DescribeResponse) -> ServerInfo:
    tiers = tuple(
        TierInfo(
            t.name,
            t.model,
            t.replicas,
            t.sessions,
            t.context_len,
            t.vocab_size,
            t.parameters,
            t.device,
            tuple((point.tokens, point.seconds) for point in t.pass_cost),
            t.context_s,
            t.dtype,
            t.same_bits if t.HasField("same_bits") else None,
        )
        for t in response.tiers
    )
    return ServerInfo(tiers, response.max_model_len, response.window, response.version)
