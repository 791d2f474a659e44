"""Parameters of requests. Clients use this module, so it imports no PyTorch."""

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, Self, TypeVar, cast

from cascade.errors import InvalidRequest

Kind = TypeVar("Kind")
MAX_SEED = 2**63 - 1
DRAWN_BITS = 53  # bits of seeds drawn at random: JavaScript rounds larger numbers
RANDOM_SEED = -1  # means a random seed, as does None
MAX_TOP_K = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 1 << 16
MAX_CHOICES = 1024
MAX_WINDOW = 256
DEFAULT_WINDOW = 32  # twice what one pass scores: while it runs, the drafter makes guesses for the next one
MOST_BRANCHES = 8  # branches that a tier may offer and prepare by default
MAX_BRANCHES = 32  # the most that a request may ask for
MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
RANGES: dict[str, tuple[float, float]] = {  # allowed values of sampling parameters
    "temperature": (0, 100),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
STRUCTURED_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
NOT_HERE = {  # vLLM's parameters that do not exist here, and what to do instead
    "n": "give the prompt as often as you want answers, each with a SamplingParams and seed of its own",
    "best_of": "leave it out",
    "structured_outputs": "it is structured",
    "guided_decoding": "it is structured",
}
LONE_SURROGATE = "it has half a character (a lone surrogate), which is no text: leave it out"


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"{field} is {value!r}: it must be {rule}", field.partition(" ")[0])


def checked(field: str, value: Kind | None, kind: type[Kind]) -> Kind:
    """``value``, by default ``kind()``; raises `InvalidRequest` for anything else, such as a dictionary."""
    value = kind() if value is None else value
    _require(isinstance(value, kind), field, value, f"a `{kind.__name__}`")
    return value


def _limit(field: str, number: int, most: int, unit: str) -> None:
    if number > most:
        raise InvalidRequest(f"{field} is {number} {unit}: it must be at most {most} {unit}", field)


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    """Whether it is an integer from ``low`` to ``high``; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_real(value: object, low: float, high: float) -> bool:
    """Whether it is a number from ``low`` to ``high``; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _own_number(value: Any) -> Any:
    """A number of NumPy or another library as Python's; anything else unchanged."""
    if isinstance(value, bool | int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """The values of a field as a tuple: empty for ``None``, one for a string."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    _require(isinstance(value, Iterable) and not isinstance(value, bytes), name, value, "a list")
    return tuple(map(_own_number, value))


def _pairs(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, sorted by id; of several pairs for one token the last one counts."""
    try:
        return tuple(sorted((_own_number(token), _own_number(value)) for token, value in dict(bias).items()))
    except (TypeError, ValueError):
        raise InvalidRequest(f"logit_bias is {bias!r}: it must be a mapping from token id to bias", "logit_bias") from None


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode a string: JSON can spell a lone surrogate, UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Structured:
    """The form that a text must have: exactly one of these. Raises `InvalidRequest`; the engine checks whether it compiles."""

    json_schema: Mapping[str, Any] | str | None = None  # a JSON text of this schema; kept as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a text that this expression matches as a whole
    choice: tuple[str, ...] = ()  # one of these texts
    grammar: str | None = None  # a text of this grammar: Lark with a rule `start`, or GBNF with a rule `root`

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            try:
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema, ensure_ascii=False))
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"structured.json_schema is not JSON: {error}", "structured.json_schema") from None
        _require(not isinstance(self.choice, str), "structured.choice", self.choice, "a list of texts")
        object.__setattr__(self, "choice", tuple(self.choice))
        given = [name for name in STRUCTURED_KINDS if getattr(self, name)]
        _require(len(given) == 1, "structured", " and ".join(given) or "empty", f"one of {', '.join(STRUCTURED_KINDS)}")
        _limit("structured.choice", len(self.choice), MAX_CHOICES, "texts")
        for text in self.choice:
            _require(isinstance(text, str) and bool(text), "structured.choice", text, "texts that are not empty")
        field, value = f"structured.{self.kind}", getattr(self, self.kind)
        if self.kind == "json_object":
            _require(value is True, field, value, "true or false")
        else:
            text = "".join(value) if self.kind == "choice" else value
            _require(isinstance(text, str), field, text, "a text")
            _limit(field, len(text), MAX_GRAMMAR_CHARS, "characters")

    @property
    def kind(self) -> str:
        return next(name for name in STRUCTURED_KINDS if getattr(self, name))

    @property
    def schema(self) -> str:
        return cast(str, self.json_schema)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How own tokens are chosen and where a text ends; docs/reference/parameters.md has the order in which parameters act.

    Raises `InvalidRequest` with the field, its value and the rule.
    """

    max_tokens: int = 128  # output tokens at most
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all; -1 becomes 0
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with this probability
    min_p: float = 0.0  # keep tokens at least this share as likely as the likeliest
    seed: int | None = None  # seed of the shared noise; None: random, and reported with the answer; -1 becomes None
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # the text ends with the first of these tokens
    ignore_eos: bool = False  # continue after the model's end-of-text token
    adapter: str = ""  # LoRA adapter of the full tier, by its name in the configuration; "" is the model itself
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the output has
    frequency_penalty: float = 0.0  # likewise, once for each time that the output has them
    repetition_penalty: float = 1.0  # divides positive logits of tokens that prompt or output have, multiplies negative ones
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens; kept as pairs
    min_tokens: int = 0  # output tokens at least: before them no ending token, and no stop string counts
    logprobs: int | None = None  # report log-probabilities: each token's own, and of so many likeliest ones
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    structured: Structured | None = None  # the form that the text must have

    def __new__(cls, *values: Any, **named: Any) -> Self:
        names = [field.name for field in fields(cls)]
        if unknown := sorted(named.keys() - set(names)):
            mend = NOT_HERE.get(unknown[0], f"it takes {', '.join(names)}")
            raise InvalidRequest(f"SamplingParams has no {unknown[0]}: {mend}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            object.__setattr__(self, name, _own_number(getattr(self, name)))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        if _is_int(self.top_k, -1, -1):
            object.__setattr__(self, "top_k", 0)
        if _is_int(self.seed, RANDOM_SEED, RANDOM_SEED):
            object.__setattr__(self, "seed", None)
        object.__setattr__(self, "logit_bias", _pairs(() if self.logit_bias is None else self.logit_bias))
        self._check_numbers()
        self._check_ends()
        _limit("logit_bias", len(self.biases), MAX_BIASES, "tokens")
        for token, bias in self.biases:
            _require(_is_int(token, 0), "logit_bias", token, "given for token ids")
            _require(_is_real(bias, -100, 100), f"logit_bias of token {token}", bias, "from -100 to 100")
        structured_ok = self.structured is None or isinstance(self.structured, Structured)
        _require(structured_ok, "structured", self.structured, "a `Structured`")
        _require(not (self.structured and self.ignore_eos), "ignore_eos", True, "False with structured, whose texts end")
        _require(isinstance(self.adapter, str), "adapter", self.adapter, "the name of an adapter")

    def _check_numbers(self) -> None:
        for name, (low, high) in RANGES.items():
            _require(_is_real(getattr(self, name), low, high), name, getattr(self, name), f"from {low} to {high}")
        _require(_is_int(self.top_k, 0, MAX_TOP_K), "top_k", self.top_k, "an integer from 0 (off) up")
        _require(_is_real(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "above 0 and at most 1")
        seed_ok = self.seed is None or _is_int(self.seed, 0, MAX_SEED)
        _require(seed_ok, "seed", self.seed, "an integer from 0 to 2^63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_int(value, 0, MAX_LOGPROBS), name, value, f"an integer from 0 to {MAX_LOGPROBS}")

    def _check_ends(self) -> None:
        _require(_is_int(self.max_tokens, 1), "max_tokens", self.max_tokens, "an integer from 1 up")
        min_ok = _is_int(self.min_tokens, 0, self.max_tokens)
        _require(min_ok, "min_tokens", self.min_tokens, f"an integer from 0 to max_tokens, {self.max_tokens}")
        _limit("stop", len(self.stop), MAX_STOPS, "strings")
        for text in self.stop:
            text_ok = isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS and is_text(text)
            _require(text_ok, "stop", text, f"strings of 1 to {MAX_STOP_CHARS} characters")
        _limit("stop_token_ids", len(self.stop_token_ids), MAX_STOP_IDS, "token ids")
        for token in self.stop_token_ids:
            _require(_is_int(token, 0), "stop_token_ids", token, "token ids")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs of token id and bias, by token id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before, through penalties."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def shaped(self) -> bool:
        """Whether a row needs a `RowState`: any parameter beyond temperature, filters and seed."""
        changed = self.penalised or self.logit_bias or self.min_tokens or self.structured
        return bool(changed) or self.logprobs is not None or self.prompt_logprobs is not None

    def seeded(self) -> "SamplingParams":
        """The same parameters with a seed: the given one, or a random one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(DRAWN_BITS))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a token id is not below ``vocab_size``."""
        for name, ids in (("logit_bias", [token for token, _ in self.biases]), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                _require(token < vocab_size, name, token, f"token ids from 0 to {vocab_size - 1}")


def check_adapter(name: str, adapters: Iterable[str]) -> None:
    """Raise `InvalidRequest` if a request names an adapter that the full tier does not have."""
    names = tuple(adapters)
    _require(not name or name in names, "adapter", name, f"one of {', '.join(names)}" if names else "empty: none is served")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request uses drafts. This never changes its text. Raises `InvalidRequest`."""

    mode: Literal["auto", "off"] = "auto"  # "off": the full model alone
    # names of the lower tiers and the drafters inside tiers to use, in any order; None: those that pay
    tiers: tuple[str, ...] | None = None
    window: int | None = None  # tokens a tier may run ahead of the tier above; None: the server's default
    branches: int | None = None  # branches that a tier may offer and extend; 0: none; None: as many as pay

    def __post_init__(self) -> None:
        if self.tiers is not None:
            object.__setattr__(self, "tiers", tuple(self.tiers))
        _require(self.mode in ("auto", "off"), "speculation.mode", self.mode, "'auto' or 'off'")
        window_ok = self.window is None or _is_int(self.window, 1, MAX_WINDOW)
        _require(window_ok, "speculation.window", self.window, f"an integer from 1 to {MAX_WINDOW}")
        branches_ok = self.branches is None or _is_int(self.branches, 0, MAX_BRANCHES)
        _require(branches_ok, "speculation.branches", self.branches, f"an integer from 0 to {MAX_BRANCHES}")

    def draft_window(self, default: int) -> int:
        """Tokens that a tier may run ahead: the request's window, or the server's ``default``."""
        return self.window or default

    @property
    def most_branches(self) -> int:
        """Branches of a tier at most."""
        return MOST_BRANCHES if self.branches is None else self.branches

    @property
    def adaptive(self) -> bool:
        """Whether tiers that do not pay may be left out; False if the request names tiers."""
        return self.mode == "auto" and self.tiers is None

    def chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Tiers and drafters to use below the full tier, top to bottom; ``names`` are those of the cascade, bottom to top."""
        lower = names[:-1]
        chosen = lower if self.tiers is None else self.tiers
        rule = f"one of the tiers and drafters below {names[-1]}: {', '.join(lower) or 'none'}"
        for name in chosen:
            _require(name in lower, "speculation.tiers", name, rule)
        return () if self.mode == "off" else tuple(name for name in reversed(lower) if name in chosen)


@dataclass(frozen=True, slots=True)
class Handling:
    """How the server handles a request. This never changes its text. Raises `InvalidRequest`."""

    priority: int = 0  # lower is served sooner; no request starves, see `cascade.tier.scheduler.PRIORITY_S`
    cache_salt: str = ""  # keys and values of a prompt are reused only among requests with the same salt
    train: bool = True  # drafters may learn from the answer, where the server lets them

    def __post_init__(self) -> None:
        priorities = f"an integer from {-MAX_PRIORITY} (first) to {MAX_PRIORITY} (last)"
        _require(_is_int(self.priority, -MAX_PRIORITY, MAX_PRIORITY), "priority", self.priority, priorities)
        salts = f"a string of at most {MAX_SALT_CHARS} characters"
        _require(isinstance(self.cache_salt, str), "cache_salt", self.cache_salt, salts)
        _limit("cache_salt", len(self.cache_salt), MAX_SALT_CHARS, "characters")
        if not is_text(self.cache_salt):
            raise InvalidRequest(f"cache_salt is {self.cache_salt!r}: {LONE_SURROGATE}", "cache_salt")
        _require(isinstance(self.train, bool), "train", self.train, "true or false")
