"""What a request may ask for. Knows nothing of models or devices, so that clients need no torch."""

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from cascade.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_WINDOW = 256
DEFAULT_WINDOW = 32  # twice what one pass scores: while it runs, the guesses for the next are made
LOCKSTEP_WINDOW = 8  # a lockstep round has a use for no more


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"{field} is {value!r}: it must be {rule}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How own tokens are chosen and where a text ends. Raises `InvalidRequest` naming the field, value and rule."""

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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer from 1 up")
        _require(
            _is_real(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "from 0 to 100",
        )
        _require(_is_int(self.top_k) and 0 <= self.top_k < 2**31, "top_k", self.top_k, "an integer from 0 (off) up")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        seed_ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED)
        _require(seed_ok, "seed", self.seed, "an integer from 0 to 2^63 - 1")
        _require(len(stop) <= MAX_STOPS, "stop", f"{len(stop)} strings", f"at most {MAX_STOPS} strings")
        for text in stop:
            _require(
                isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS,
                "stop",
                text,
                "strings of 1 to 256 characters",
            )
        for token in self.stop_token_ids:
            _require(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids")
        _require(isinstance(self.adapter, str), "adapter", self.adapter, "the name of an adapter")

    def seeded(self) -> "SamplingParams":
        """The same parameters with a seed: the given one, or a random one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def check_adapter(name: str, known: Iterable[str]) -> None:
    """Raise `InvalidRequest` if a request names an adapter that the full tier does not have."""
    known = tuple(known)
    _require(not name or name in known, "adapter", name, f"one of {', '.join(known)}" if known else "empty: none is served")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts may be used for a request; never changes its text. Raises `InvalidRequest`."""

    mode: Literal["auto", "off"] = "auto"  # "off": the full model alone
    tiers: tuple[str, ...] | None = None  # lower tiers to use, by name in any order; None: all
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
