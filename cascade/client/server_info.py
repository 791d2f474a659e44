"""The description of a server that `Describe` returns."""

from dataclasses import dataclass, field

from cascade.client.exchange import Exchange
from cascade.client.wire import decode_sampling, values
from cascade.params import SamplingParams
from cascade.planner.chains import Worth
from cascade.v1 import serving_pb2 as pb


@dataclass(frozen=True, slots=True)
class TierInfo:
    """One tier of a server; ``sessions`` counts those of the replica that answered."""

    name: str
    model: str
    replicas: int
    sessions: int
    context_len: int
    vocab_size: int
    parameters: int
    device: str
    pass_cost: tuple[tuple[int, float], ...] = ()  # tokens and seconds, the points of `cascade.planner.cost.Profile`
    context_s: float = 0.0  # seconds that each position held by the sessions of a pass adds to the pass
    worth: tuple[Worth, ...] = ()  # the gain from tiers below, as measured by the replica that answered
    dtype: str = ""  # dtype of the weights
    engine: str = ""  # engine that runs its passes: "cascade" or "vllm"
    same_bits: bool | None = None  # whether a text's logits have the same bits in every pass; None if unknown


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Limits of the requests of one API key; ``None`` means no limit."""

    name: str = ""  # the key's name; empty if unknown
    min_priority: int | None = None  # lowest allowed priority; lower is served sooner
    weight: float = 1.0  # share of the tokens, relative to other keys, while requests wait
    max_running: int | None = None  # answers at the same time
    tokens_per_minute: int | None = None  # tokens of prompts and answers together
    train: bool = True  # drafters may learn from its answers, where the server lets them


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of a server; ``tiers`` are listed bottom to top."""

    tiers: tuple[TierInfo, ...]
    max_model_len: int  # longest prompt and output together, tokens
    window: int  # tokens that a tier may run ahead by default
    version: str  # cascade's version
    drafters: tuple[str, ...] = ()  # drafters inside tiers; their levels come before those of the tiers
    branches: int = 0  # branches that a tier may offer and prepare by default
    key: KeyInfo = KeyInfo()  # limits of the caller's key
    defaults: SamplingParams = field(default_factory=SamplingParams)  # sampling parameters of requests that give none


class Description(Exchange[ServerInfo, ServerInfo]):
    """A call of `Describe`."""

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
