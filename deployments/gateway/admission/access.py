"""API keys: identify the sender of a request, and limit the requests of a key."""

import base64
import contextlib
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cascade.errors import ConfigError, InvalidRequest, Overloaded, PermissionDenied, Unauthenticated
from cascade.settings.router import AccessConfig, KeyLimits

log = logging.getLogger(__name__)

REQUIRED = "CASCADE_REQUIRE_KEYS"  # environment variable; 1 means `AccessConfig.required`; the image sets it
MIN_KEY_CHARS = 8  # the minimum of NIST SP 800-63B for chosen secrets; allows `token-abc123` of vLLM's examples
LOOK_S = 1.0  # seconds between two checks of the file of keys
ANONYMOUS = "anonymous"  # name of the account of all clients if no keys are set


@dataclass(slots=True)
class Account:
    """Usage of one key at this router. Tokens are charged when read or written; below a balance of 0, requests are refused."""

    name: str
    limits: KeyLimits = field(default_factory=KeyLimits)
    num_running: int = 0
    _balance: float = 0.0  # tokens
    _since: float = field(default_factory=lambda: time.monotonic())  # when the balance was updated

    def __post_init__(self) -> None:
        self._balance = float(self.limits.tokens_per_minute or 0)

    @contextlib.contextmanager
    def admitted(self, num_answers: int) -> Iterator[None]:
        """Hold places for answers; raises `Overloaded` if too few are left, `InvalidRequest` if there are never enough."""
        most, rate = self.limits.max_running, self.limits.tokens_per_minute
        if most is not None and num_answers > most:
            raise InvalidRequest(
                f"The request asks for {num_answers} answers at once: key {self.name} may have {most}; "
                "send fewer prompts, or a smaller n"
            )
        if rate is not None:
            now = time.monotonic()
            self._balance, self._since = min(float(rate), self._balance + (now - self._since) * rate / 60), now
            if self._balance <= 0:
                wait_s = (1 - self._balance) * 60 / rate
                raise Overloaded(f"Key {self.name} may use {rate} tokens a minute, and has used them", wait_s)
        if most is not None and self.num_running + num_answers > most:
            raise Overloaded(f"Key {self.name} may have {most} answers written at once, and has {self.num_running}")
        self.num_running += num_answers
        try:
            yield
        finally:
            self.num_running -= num_answers

    def check_priority(self, priority: int) -> None:
        """Raise `PermissionDenied` if the priority of a request is lower (sooner) than the key allows."""
        soonest = self.limits.min_priority
        if soonest is not None and priority < soonest:
            raise PermissionDenied(
                f"priority is {priority}: requests of key {self.name} may ask for {soonest} and up, lower is served sooner"
            )

    def charge(self, num_tokens: int) -> None:
        """Count tokens that were read or written for the key."""
        self._balance -= num_tokens


class Access:
    """The keys of a server; those of a file are read again when it has changed. Raises `ConfigError` if they cannot be used."""

    def __init__(self, config: AccessConfig) -> None:
        self.config = config
        self._accounts: dict[bytes, Account] = {}  # accounts by digests of keys
        self._anonymous = Account(ANONYMOUS, config.default_limits)
        self._look_at = time.monotonic() + LOOK_S
        self._problem = ""  # error in the file of keys
        self._set_keys(_read(config))
        if unknown := sorted(set(config.limits) - {account.name for account in self._accounts.values()}):
            raise ConfigError(f"router.access.limits names {unknown[0]!r}, and no key has this name: add it or fix the name")

    def _set_keys(self, names: Mapping[bytes, str]) -> None:
        """Replace the keys. A key that stays keeps its usage; running answers of removed keys continue."""
        kept = {account.name: account for account in self._accounts.values()}
        self._accounts = {digest: kept.get(name) or Account(name, self._limits(name)) for digest, name in names.items()}

    def _limits(self, name: str) -> KeyLimits:
        """Limits of a key. With several keys, none may have a priority below 0 unless its limits allow that."""
        limits = self.config.limits.get(name, self.config.default_limits)
        return limits if limits.min_priority is not None else limits.model_copy(update={"min_priority": 0})

    def _renew(self) -> None:
        """Reread the file of keys; if it cannot be used, log that and change nothing."""
        if self.config.keys_file is None or time.monotonic() < self._look_at:
            return
        self._look_at, before, self._problem = time.monotonic() + LOOK_S, self._problem, ""
        try:
            names = _read(self.config)
        except ConfigError as error:
            self._problem = str(error)
            if self._problem != before:
                log.error("Keys stay unchanged: %s", error)
            return
        if names != {digest: account.name for digest, account in self._accounts.items()}:
            self._set_keys(names)

    def account(self, authorization: str | None) -> Account:
        """The account of a request, by ``Bearer KEY``, or by ``Basic`` with the key as password, as browsers send it.

        Raises `Unauthenticated`. Takes the same time for every key.
        """
        if not self._accounts:
            return self._anonymous
        self._renew()
        scheme, _, credentials = (authorization or "").partition(" ")
        key = credentials if scheme.lower() == "bearer" else ""
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                key = base64.b64decode(credentials, validate=True).decode("latin-1").partition(":")[2]
        if not key:
            raise Unauthenticated("The request has no API key: send it as 'Authorization: Bearer KEY'")
        digest_of_key = _digest(key.strip())
        accounts = [account for digest, account in self._accounts.items() if hmac.compare_digest(digest, digest_of_key)]
        if not accounts:
            raise Unauthenticated("The API key is not known here")
        return accounts[0]


def _read(config: AccessConfig) -> dict[bytes, str]:
    """Names of keys, by the keys' digests; raises `ConfigError`."""
    keys = _parse(os.environ.get(config.keys_env, ""), f"The environment variable {config.keys_env}")
    if config.keys_file is not None:
        try:
            text = Path(config.keys_file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"router.access.keys_file is {config.keys_file!r}, which cannot be read: {reason}") from None
        more = _parse(text, config.keys_file)
        if not more:
            raise ConfigError(f"router.access.keys_file is {config.keys_file!r}, which has no keys: write NAME=KEY lines")
        keys |= more
    asked = os.environ.get(REQUIRED) or "0"
    if asked not in ("0", "1"):
        raise ConfigError(f"{REQUIRED} is {asked!r}: it must be 1, to start only with keys, or 0")
    if not keys and (config.required or asked == "1"):
        raise ConfigError(
            f"There are no API keys where this router runs, and keys are required: set {config.keys_env} on its node, "
            f"or router.access.keys_file, or allow requests without a key with required: false and {REQUIRED}=0"
        )
    return {_digest(key): name for name, key in keys.items()}


def _digest(key: str) -> bytes:
    """A key's digest, of the same size for all, so that the time of a comparison does not reveal a key's length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _parse(text: str, where: str) -> dict[str, str]:
    """Keys by name, from lines NAME=KEY; skips empty lines and comments (#). Errors never show a key."""
    keys: dict[str, str] = {}
    for number, line in enumerate(text.replace(",", "\n").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, key = (part.strip() for part in line.partition("="))
        if not equals or not name:
            raise ConfigError(f"{where}: entry {number} is not NAME=KEY")
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(f"{where}: the key {name!r} has {len(key)} characters; it needs at least {MIN_KEY_CHARS}")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{where}: the key {name!r} is not printable ASCII, which no request can send: choose another")
        if name in keys or key in keys.values():
            raise ConfigError(f"{where}: entry {number} repeats a name or a key")
        keys[name] = key
    return keys
