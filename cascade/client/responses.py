"""A server's responses, as the values that the library has for them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, get_args

from cascade.answer import Chunk, Completion, FinishReason, PromptToken, Stats, Undrafted
from cascade.client.wire import decode_edge, decode_lane
from cascade.errors import Unavailable
from cascade.messages import Logprobs, origin
from cascade.params import RULES, Rule
from cascade.planner.chains import Worth
from cascade.v1 import serving_pb2 as pb

Piece = TypeVar("Piece")
UNDRAFTED: tuple[Undrafted, ...] = get_args(Undrafted)


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
    pass_cost: tuple[tuple[int, float], ...] = ()  # tokens and seconds, the points of `cascade.planner.cost.PassCost`
    context_s: float = 0.0  # seconds that each position held by the sessions of a pass adds to it
    worth: tuple[Worth, ...] = ()  # of the tiers below, as the replica that answered has measured it
    dtype: str = ""  # of its weights
    engine: str = ""  # that runs its passes: "cascade" or "vllm"
    same_bits: bool | None = None  # whether a text's logits have the same bits in every pass; None if the server does not say


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What the requests of one API key may ask for; ``None`` is any."""

    name: str = ""  # of the key; empty if the server does not say
    min_priority: int | None = None  # lowest, which is served soonest
    weight: float = 1.0  # share of the tokens beside those of other keys, where requests wait
    max_running: int | None = None  # answers at once
    tokens_per_minute: int | None = None  # of prompts and answers


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server serves; tiers bottom to top."""

    tiers: tuple[TierInfo, ...]
    max_model_len: int  # longest prompt and output together, tokens
    window: int  # tokens a tier may run ahead unless a request says otherwise
    version: str  # of cascade
    drafters: tuple[str, ...] = ()  # inside tiers; in levels they come before the tiers
    branches: int = 0  # branches beside its text that a tier may write unless a request says otherwise
    key: KeyInfo = KeyInfo()  # the caller's


class Builder(ABC, Generic[Piece]):
    """Puts the responses of one stream together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens: list[pb.Token] = []
        self._prompt: list[pb.PromptToken] = []
        self._seed: int | None = None
        self.complete = False

    def check(self) -> None:
        """Raise `Unavailable` if the stream has ended before its text."""
        if not self.complete:
            raise Unavailable("The server ended the stream before the text was complete")

    def resume(self, request: pb.GenerateRequest | pb.ChatRequest) -> bool:
        """Let ``request`` go on after the tokens that came; False if the server did not say by which seed."""
        if self._seed is not None:
            request.sampling.seed = self._seed
        if not self._tokens:
            return True
        request.resume.token_ids[:] = [token.id for token in self._tokens]
        return request.sampling.HasField("seed")

    @abstractmethod
    def add(self, response: Any) -> Piece:
        """What the next response brings."""

    def _chunk(self, response: pb.GenerateResponse | pb.ChatResponse, text: str) -> Chunk:
        """The next response as a piece of the model's ``text``; the last one brings the completion."""
        if response.HasField("seed"):
            self._seed = response.seed
        self._text.append(text)
        self._tokens += response.tokens
        self._prompt += response.prompt
        completion = None
        if response.HasField("finish"):
            completion = build_completion("".join(self._text), self._tokens, response.finish, self._prompt)
            self.complete = True
        ids = tuple(token.id for token in response.tokens)
        ends = tuple(token.end for token in response.tokens)
        origins, logprobs = _origins(response.tokens), _logprobs(response.tokens)
        prompt, lanes = _prompt_tokens(response.prompt), tuple(map(decode_lane, response.lanes))
        seed = response.seed if response.HasField("seed") else None
        return Chunk(text, ids, ends, origins, completion, logprobs=logprobs, prompt=prompt, lanes=lanes, seed=seed)


class CompletionBuilder(Builder[Chunk]):
    """Makes chunks of the responses of a stream."""

    def add(self, response: pb.GenerateResponse) -> Chunk:
        return self._chunk(response, response.text)


def read_completion(response: pb.CompleteResponse) -> Completion:
    return build_completion(response.text, response.tokens, response.finish, response.prompt)


def build_completion(text: str, tokens: Sequence[pb.Token], finish: pb.Finish, prompt: Sequence[pb.PromptToken]) -> Completion:
    edges = tuple(map(decode_edge, finish.edges))
    reason: FinishReason = "length" if finish.reason == "length" else "stop"
    first_token_s = finish.first_token_s if finish.HasField("first_token_s") else None
    undrafted = next((known for known in UNDRAFTED if known == finish.undrafted), None)  # a newer server may know more
    rule: Rule = next((known for known in RULES if known == finish.rule), "coupled")  # an older server knows no other
    written = finish.prompt_tokens, finish.completion_tokens
    stats = Stats(*written, edges, first_token_s, undrafted, rule, finish.cached_tokens)
    ids, origins, logprobs = tuple(token.id for token in tokens), _origins(tokens), _logprobs(tokens)
    had, stop = _prompt_tokens(prompt), finish.stop_string if finish.HasField("stop_string") else None
    return Completion(text, ids, reason, finish.seed, stats, origins, logprobs=logprobs, prompt=had, stop_string=stop)


def _origins(tokens: Sequence[pb.Token]) -> bytes:
    return bytes(origin(token.level, token.corrected) for token in tokens)


def _prompt_tokens(tokens: Sequence[pb.PromptToken]) -> tuple[PromptToken, ...]:
    return tuple(
        PromptToken(token.id, token.logprob if token.HasField("logprob") else None, _likeliest(token.top)) for token in tokens
    )


def _logprobs(tokens: Sequence[pb.Token]) -> tuple[Logprobs, ...]:
    """One for each token if the request asked for them, else none."""
    return tuple(Logprobs(token.logprob, _likeliest(token.top)) for token in tokens if token.HasField("logprob"))


def _likeliest(tokens: Sequence[pb.TopToken]) -> tuple[tuple[int, float], ...]:
    return tuple((token.id, token.logprob) for token in tokens)


def read_server_info(response: pb.DescribeResponse) -> ServerInfo:
    tiers = tuple(map(_tier_info, response.tiers))
    drafters = tuple(response.drafters)
    window, branches, key = response.window, response.branches, _key_info(response)
    return ServerInfo(tiers, response.max_model_len, window, response.version, drafters, branches, key)


def _key_info(response: pb.DescribeResponse) -> KeyInfo:
    if not response.HasField("key"):  # an older server
        return KeyInfo()
    said = response.key
    limits = {name: getattr(said, name) for name in ("min_priority", "max_running", "tokens_per_minute") if said.HasField(name)}
    return KeyInfo(said.name, weight=said.weight, **limits)


def _tier_info(tier: pb.Tier) -> TierInfo:
    same: dict[str, Any] = {field.name: getattr(tier, field.name) for field in fields(TierInfo)}
    cost = tuple((point.tokens, point.seconds) for point in tier.pass_cost)
    worth = tuple(Worth(one.drafter, one.sampled, one.num_sessions, one.factor) for one in tier.worth)
    bits = tier.same_bits if tier.HasField("same_bits") else None
    return TierInfo(**same | {"pass_cost": cost, "worth": worth, "same_bits": bits})
