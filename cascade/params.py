"""What a request may ask for. Knows nothing of models or devices, so that clients need no torch."""

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from cascade.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_WINDOW = 256
DEFAULT_WINDOW = 32  # twice what one pass scores: while it runs, the guesses for the next are made
LOCKSTEP_WINDOW = 8  # a lockstep round has a use for no more
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 1 << 16
MAX_CHOICES = 1024
MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
HALF_CHARACTER = "it has half a character (a lone surrogate), which is no text: leave it out"
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"{field} is {value!r}: it must be {rule}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return _is_int(value) and cast(int, value) >= 0


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pairs(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Pairs in the order of their tokens; of several for one token the last holds."""
    try:
        chosen = dict(bias)
        return tuple(sorted(chosen.items()))
    except (TypeError, ValueError):
        raise InvalidRequest(f"logit_bias is {bias!r}: it must be a mapping from token id to bias") from None


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"structured.json_schema is not JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class Structured:
    """What a text has to be: exactly one of these. Raises `InvalidRequest`; whether it compiles, `Grammars` says."""

    json_schema: Mapping[str, Any] | str | None = None  # a JSON text of this schema; kept as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a text that this expression matches as a whole
    choice: tuple[str, ...] = ()  # one of these texts
    grammar: str | None = None  # a text of this grammar: Lark with a rule `start`, or GBNF with a rule `root`

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", _json(self.json_schema))
        _require(not isinstance(self.choice, str), "structured.choice", self.choice, "a list of texts")
        object.__setattr__(self, "choice", tuple(self.choice))
        chosen = [name for name in KINDS if getattr(self, name)]
        _require(len(chosen) == 1, "structured", " and ".join(chosen) or "empty", f"one of {', '.join(KINDS)}")
        _require(len(self.choice) <= MAX_CHOICES, "structured.choice", f"{len(self.choice)} texts", f"at most {MAX_CHOICES}")
        for text in self.choice:
            _require(isinstance(text, str) and bool(text), "structured.choice", text, "texts that are not empty")
        name = chosen[0]
        value = "".join(self.choice) if name == "choice" else getattr(self, name)
        _require(isinstance(value, bool if name == "json_object" else str), f"structured.{name}", value, "a text")
        if isinstance(value, str):
            size_ok = len(value) <= MAX_GRAMMAR_CHARS
            _require(size_ok, f"structured.{name}", f"{len(value)} characters", f"at most {MAX_GRAMMAR_CHARS}")

    @property
    def kind(self) -> str:
        """Which of the fields is set."""
        return next(name for name in KINDS if getattr(self, name))

    @property
    def schema(self) -> str:
        """``json_schema`` as JSON text."""
        return cast(str, self.json_schema)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How own tokens are chosen and where a text ends; docs/parameters.md tells in which order.

    Raises `InvalidRequest` naming the field, value and rule.
    """

    max_tokens: int = 128  # output tokens at most
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with this probability
    min_p: float = 0.0  # keep tokens at least this share as likely as the likeliest
    seed: int | None = None  # of the shared noise; drawn at random if None, and reported
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # the text ends with the first of these tokens
    ignore_eos: bool = False  # go on behind the model's end-of-text token
    adapter: str = ""  # LoRA adapter of the full tier, by its name in the configuration; "" is the model itself
    presence_penalty: float = 0.0  # taken from the logits of tokens that the output has
    frequency_penalty: float = 0.0  # the same for each time that the output has them
    repetition_penalty: float = 1.0  # divides logits, if negative multiplies them, of tokens that prompt or output have
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens; kept as pairs
    min_tokens: int = 0  # output tokens at least: no end and no stop string before
    logprobs: int | None = None  # report log-probabilities: each token's own, and of so many likeliest ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    structured: Structured | None = None  # what the text has to be

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        self._check_choice()
        self._check_penalties()
        self._check_ends()
        seed_ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED)
        _require(seed_ok, "seed", self.seed, "an integer from 0 to 2^63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            logprobs_ok = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
            _require(logprobs_ok, name, value, f"an integer from 0 to {MAX_LOGPROBS}")
        structured_ok = self.structured is None or isinstance(self.structured, Structured)
        _require(structured_ok, "structured", self.structured, "a `Structured`")
        _require(not (self.structured and self.ignore_eos), "ignore_eos", True, "False with structured, whose texts end")

    def _check_choice(self) -> None:
        _require(
            _is_real(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "from 0 to 100",
        )
        _require(_is_int(self.top_k) and 0 <= self.top_k < 2**31, "top_k", self.top_k, "an integer from 0 (off) up")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_real(value) and -2 <= value <= 2, name, value, "from -2 to 2")
        repetition = self.repetition_penalty
        _require(_is_real(repetition) and 0.01 <= repetition <= 100, "repetition_penalty", repetition, "from 0.01 to 100")
        biases = self.biases
        _require(len(biases) <= MAX_BIASES, "logit_bias", f"{len(biases)} tokens", f"at most {MAX_BIASES} tokens")
        for token, bias in biases:
            _require(_is_id(token), "logit_bias", token, "given for token ids")
            _require(_is_real(bias) and -100 <= bias <= 100, f"logit_bias of token {token}", bias, "from -100 to 100")

    def _check_ends(self) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer from 1 up")
        min_ok = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        _require(min_ok, "min_tokens", self.min_tokens, f"an integer from 0 to max_tokens, {self.max_tokens}")
        _require(len(self.stop) <= MAX_STOPS, "stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS} strings")
        for text in self.stop:
            _require(
                isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS,
                "stop",
                text,
                "strings of 1 to 256 characters",
            )
        num_ids = len(self.stop_token_ids)
        _require(num_ids <= MAX_STOP_IDS, "stop_token_ids", f"{num_ids} token ids", f"at most {MAX_STOP_IDS} token ids")
        for token in self.stop_token_ids:
            _require(_is_id(token), "stop_token_ids", token, "token ids")
        _require(isinstance(self.adapter, str), "adapter", self.adapter, "the name of an adapter")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs of token id and bias, by token id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def penalised(self) -> bool:
        """Logits depend on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def shaped(self) -> bool:
        """More is asked of a pass than temperature and the filters of likely tokens: its rows need a history."""
        asked = self.penalised or self.logit_bias or self.min_tokens or self.structured
        return bool(asked) or self.logprobs is not None or self.prompt_logprobs is not None

    def seeded(self) -> "SamplingParams":
        """The same parameters with a seed: the given one, or a random one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a token id is not below ``vocab_size``."""
        for name, ids in (("logit_bias", [token for token, _ in self.biases]), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                _require(token < vocab_size, name, token, f"token ids from 0 to {vocab_size - 1}")


def check_adapter(name: str, known: Iterable[str]) -> None:
    """Raise `InvalidRequest` if a request names an adapter that the full tier does not have."""
    known = tuple(known)
    _require(not name or name in known, "adapter", name, f"one of {', '.join(known)}" if known else "empty: none is served")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts may be used for a request; never changes its text. Raises `InvalidRequest`."""

    mode: Literal["auto", "off"] = "auto"  # "off": the full model alone
    tiers: tuple[str, ...] | None = None  # lower tiers to use, by name in any order; None: those that pay, see `Planner`
    window: int | None = None  # tokens a tier may run ahead of the tier above; None: the server's default
    schedule: Literal["async", "lockstep"] = "async"  # "lockstep": draft a whole window, wait, verify, wait

    def __post_init__(self) -> None:
        if self.tiers is not None:
            object.__setattr__(self, "tiers", tuple(self.tiers))
        _require(self.mode in ("auto", "off"), "speculation.mode", self.mode, "'auto' or 'off'")
        _require(self.schedule in ("async", "lockstep"), "speculation.schedule", self.schedule, "'async' or 'lockstep'")
        window_ok = self.window is None or (_is_int(self.window) and 1 <= self.window <= MAX_WINDOW)
        _require(window_ok, "speculation.window", self.window, f"an integer from 1 to {MAX_WINDOW}")

    def draft_window(self, default: int) -> int:
        """Tokens that a tier may run ahead, if ``default`` are where the request says nothing."""
        return self.window or (min(default, LOCKSTEP_WINDOW) if self.schedule == "lockstep" else default)

    @property
    def adaptive(self) -> bool:
        """Tiers that do not pay may be left out: the request names none, and is no measurement of lockstep."""
        return self.mode == "auto" and self.tiers is None and self.schedule == "async"

    def chain(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Tiers to use below the full one, top to bottom, of a cascade with tiers ``names`` bottom to top."""
        lower = names[:-1]
        chosen = lower if self.tiers is None else self.tiers
        for name in chosen:
            _require(
                name in lower,
                "speculation.tiers",
                name,
                f"one of the tiers below {names[-1]}: {', '.join(lower) or 'none'}",
            )
        return () if self.mode == "off" else tuple(name for name in reversed(lower) if name in chosen)


def is_text(value: str) -> bool:
    """Whether it can be sent: a lone surrogate, which JSON can spell, cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Handling:
    """How a request is treated beside others; never changes its text. Raises `InvalidRequest`."""

    priority: int = 0  # lower is served sooner, see `cascade.chain.scheduler.PRIORITY_S`; nobody starves
    cache_salt: str = ""  # keys and values of a prompt are reused only among requests with the same salt
    watch: bool = False  # the stream also tells of guesses that nobody has judged yet, see `cascade.messages.Lane`

    def __post_init__(self) -> None:
        whole = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if not whole or not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority is {self.priority!r}: it must be an integer from {-MAX_PRIORITY} (first) to {MAX_PRIORITY} (last)"
            )
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARS:
            shown = f"{len(self.cache_salt)} characters long" if isinstance(self.cache_salt, str) else repr(self.cache_salt)
            raise InvalidRequest(f"cache_salt is {shown}: it must be a string of at most {MAX_SALT_CHARS} characters")
        if not is_text(self.cache_salt):
            raise InvalidRequest(f"cache_salt is {self.cache_salt!r}: {HALF_CHARACTER}")
        if not isinstance(self.watch, bool):
            raise InvalidRequest(f"watch is {self.watch!r}: it must be true or false")
