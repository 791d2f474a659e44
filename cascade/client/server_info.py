"""What a server serves, as its clients are told."""

from dataclasses import dataclass, field

from cascade.client.exchange import Exchange
from cascade.client.wire import decode_sampling, values
from cascade.params import SamplingParams
from cascade.planner.chains import Worth
from cascade.v1 import serving_pb2 as pb


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
    pass_cost: tuple[tuple[int, float], ...] = ()  # tokens and seconds, the points of `cascade.planner.cost.Profile`
    context_s: float = 0.0  # seconds that each position held by the sessions of a pass adds to it
    worth: tuple[Worth, ...] = ()  # what the tiers below are worth, as the answering replica has measured it
    dtype: str = ""  # its weights' dtype
    engine: str = ""  # what runs its passes: "cascade" or "vllm"
    same_bits: bool | None = None  # whether a text's logits have the same bits in every pass; None if the server does not say


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What the requests of one API key may ask for; ``None`` is any."""

    name: str = ""  # the key's name; empty if the server does not say
    min_priority: int | None = None  # lowest, which is served soonest
    weight: float = 1.0  # share of the tokens beside those of other keys, where requests wait
    max_running: int | None = None  # answers at once
    tokens_per_minute: int | None = None  # prompts and answers together
    train: bool = True  # drafters may learn from its answers, where the server lets them


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server serves; tiers bottom to top."""

    tiers: tuple[TierInfo, ...]
    max_model_len: int  # longest prompt and output together, tokens
    window: int  # tokens a tier may run ahead unless a request says otherwise
    version: str  # cascade's version
    drafters: tuple[str, ...] = ()  # inside tiers; in levels they come before the tiers
    branches: int = 0  # branches beside its text that a tier may write unless a request says otherwise
    key: KeyInfo = KeyInfo()  # the caller's
    defaults: SamplingParams = field(default_factory=SamplingParams)  # what a request without parameters gets


class Description(Exchange[ServerInfo, ServerInfo]):
    """The question what a server serves."""

    rpc = "Describe"
    timeout_s = 30.0
    probing = True

    def add(self, response: pb.DescribeResponse) -> ServerInfo:
        tiers = tuple(map(_tier_info, response.tiers))
        decoded = {"tiers": tiers, "key": KeyInfo(**values(response.key)), "defaults": decode_sampling(response.defaults)}
        self.whole = ServerInfo(**values(response) | decoded)
        return self.whole


def _tier_info(tier: pb.Tier) -> TierInfo:
    cost = tuple((point.tokens, point.seconds) for point in tier.pass_cost)
    return TierInfo(**values(tier) | {"pass_cost": cost, "worth": tuple(Worth(**values(worth)) for worth in tier.worth)})
