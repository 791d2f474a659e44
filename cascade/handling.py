"""How a request is treated beside others. Knows nothing of models, so that clients need no torch."""

from dataclasses import dataclass

from cascade.errors import InvalidRequest

MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
HALF_CHARACTER = "it has half a character (a lone surrogate), which is no text: leave it out"


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

    priority: int = 0  # lower is served sooner, see `cascade.schedule.PRIORITY_S`; nobody starves
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
