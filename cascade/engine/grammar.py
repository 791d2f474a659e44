"""Structured output (JSON schemas, regular expressions, grammars) as masks over the vocabulary.

llguidance does the work (https://github.com/guidance-ai/llguidance): an Earley parser over a lazily built lexer. It precompiles
nothing, bounds the fuel of every step, and copies a matcher in a microsecond, which guesses need.
"""

import contextlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import Structured

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists only for type checkers

MAX_COMPILED = 256  # compiled grammars that are kept
MAX_STEP = 32  # tokens that are consumed with the fuel of one step, at most
# whitespace that models write: a space, or a new line with indentation; bounded
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,20}"}
# If only one text is possible, llguidance would force the tokens into which the tokenizer cuts it, and refuse those with the
# names of special tokens (<tool_call>). Instead any tokens that spell the text are allowed.
UNFORCED = '%llguidance {"no_forcing": true}\n'
UNIQUE = "uniqueItems"
IS_UNIQUE = re.compile(rf'"{UNIQUE}"\s*:\s*true')
VALUES = ("const", "default", "enum", "examples")  # keywords of JSON schemas whose values are not schemas
MORE_THAN_SIGNS = "^(?!^[-+.]*$)"
# a step that needs more fuel than this (10 to 20 ms) fails the request
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_grammar_size=200_000, verbose_errors=False
)


class Grammars:
    """Compiles each grammar once, for the tokens of ``tokenizer``. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None
        self._building = threading.Lock()
        self._compiled: OrderedDict[Structured, tuple[LLMatcher, list[int]]] = OrderedDict()  # each with its `_first`
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Build the token table that all grammars need. It takes up to a second, and blocks all threads."""
        with contextlib.suppress(InvalidRequest):  # requests with a grammar report the error
            self._build()

    def check(self, structured: Structured, output: Sequence[int] = ()) -> None:
        """Raise `InvalidRequest` with the reason if it cannot be compiled, or does not allow ``output``."""
        if not self.matcher(structured).allows(output):
            raise InvalidRequest(
                f"resume has tokens that structured.{structured.kind} does not allow: give this answer's own", "resume"
            )

    def matcher(self, structured: Structured) -> "Matcher":
        """A matcher at the beginning of a text; raises `InvalidRequest`."""
        with self._lock:
            entry = self._compiled.get(structured)
        if entry is None:  # compiled without the lock, so that other threads continue
            fresh = self._compile(structured)
            entry = fresh, self._first(fresh)
        with self._lock:
            compiled, first = self._compiled.setdefault(structured, entry)
            self._compiled.move_to_end(structured)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return Matcher(compiled, first, partial(self._renew, structured, compiled))

    def _first(self, compiled: LLMatcher) -> list[int]:
        """One token that may begin the text, or none."""
        mask = compiled.deep_copy().compute_bitmask()
        [allowed] = _unpack([mask], 1, 8 * len(mask))
        return [token for token in allowed.nonzero()[0].tolist() if token not in self._tokenizer.end_ids][:1]

    def _renew(self, structured: Structured, broken: LLMatcher) -> LLMatcher:
        """A new matcher that shares nothing with others; the ``broken`` one is removed from the cache."""
        with self._lock:
            if structured in self._compiled and self._compiled[structured][0] is broken:
                del self._compiled[structured]
        return self._compile(structured)

    def _compile(self, structured: Structured) -> LLMatcher:
        vocabulary = self._build()
        try:
            grammar = source(structured)
        except Exception as error:  # the parser of GBNF may raise anything
            raise _refusal(structured, str(error)) from None
        compiled = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        if not compiled.is_error():
            compiled.compute_bitmask()  # the first step builds most
        if compiled.is_error():
            raise _refusal(structured, compiled.get_error())
        return compiled

    def _build(self) -> LLTokenizer:
        end_ids = sorted(self._tokenizer.end_ids)
        if not end_ids:
            raise InvalidRequest(
                "structured is set and the model has no end-of-text token: such texts could not end", "structured"
            )
        with self._building:
            if self._vocabulary is None:
                try:
                    self._vocabulary = LLTokenizer(self._tokenizer.backend.to_str(), eos_token=end_ids)
                except Exception as error:  # some kinds of tokenizers are not supported
                    reason = _one_line(str(error))
                    raise InvalidRequest(
                        f"structured cannot be honoured with the tokenizer of this model: {reason}", "structured"
                    ) from error
            return self._vocabulary


class Matcher:
    """The grammar's state after one text.

    Guesses are tried on a copy, so that an error after a wrong guess does not affect the text. But all copies of a compiled
    grammar share one lexer, which a guess can exhaust. Then every matcher gets a lexer of its own and tries no more guesses. So
    a text fails at the same place in any process, with and without drafts.
    """

    def __init__(self, compiled: LLMatcher, first: list[int], renew: Callable[[], LLMatcher]) -> None:
        self._compiled = compiled
        self._first = first  # a token that the grammar allows at the beginning
        self._renew = renew
        self._machine = compiled.deep_copy()
        self._consumed: list[int] = []  # output tokens that the machine has read
        self._num_same = 0  # how many of these still equal the output
        self._guesses = True  # whether guesses may be tried

    def rewind(self, num_tokens: int) -> None:
        """Only the first ``num_tokens`` of the output are still the same."""
        self._num_same = min(self._num_same, num_tokens)

    def allowed(self, output: Sequence[int], guesses: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """The tokens that may follow ``output``, and each of ``guesses``: bool ``[1 + guesses, vocab_size]``.

        After a forbidden guess everything is allowed, since that row is not used. There are fewer rows if a step after a guess
        takes too much work. Raises `InvalidRequest` if the step after the output does.
        """
        mask = self._follow(output)
        if mask is None:  # the tier above does not follow the grammar, so nothing is forbidden
            return np.ones((1 + len(guesses), vocab_size), dtype=np.bool_)
        if not guesses or not self._guesses:
            return _unpack([mask], 1, vocab_size)
        masks, num_rows = self._try(mask, guesses)
        if self._broken:  # some of the masks may be wrong
            return _unpack([mask], 1, vocab_size)
        return _unpack(masks, num_rows, vocab_size)

    def allows(self, output: Sequence[int]) -> bool:
        """Whether a text may begin with ``output``; raises `InvalidRequest` if that takes too much work."""
        return not output or self._follow(output) is not None

    def _try(self, mask: bytes, guesses: Sequence[int]) -> tuple[list[bytes], int]:
        """Masks after the output and after each guess, and how many of these positions are known."""
        masks, scout = [mask], self._machine.deep_copy()
        for guess in guesses:
            if scout.is_stopped() or not (guess < 8 * len(masks[-1]) and masks[-1][guess >> 3] >> (guess & 7) & 1):
                return masks, 1 + len(guesses)
            if not scout.try_consume_tokens([guess]):  # the mask allows it, so it took too much work
                break
            mask = scout.compute_bitmask()
            if scout.is_error():
                break
            masks.append(mask)
        return masks, len(masks)

    def _follow(self, output: Sequence[int]) -> bytes | None:
        """The mask after ``output``, ``None`` if the grammar does not allow that; raises `InvalidRequest`."""
        self._go_back(output)
        mask = self._consume(output[len(self._consumed) :], MAX_STEP)
        if self._guesses and self._broken:
            self._compiled = self._renew()
            self._machine, self._consumed, self._guesses = self._compiled.deep_copy(), [], False
            mask = self._consume(output, 1)
        self._num_same = len(self._consumed)
        if self._machine.is_error() or self._broken:
            reason = _one_line(self._machine.get_error()) or "the lexer has no fuel left"
            raise InvalidRequest(f"structured takes too much work for one token: give something simpler ({reason})")
        return mask if len(self._consumed) == len(output) else None

    @property
    def _broken(self) -> bool:
        """Whether a copy has exhausted the shared lexer, which masks do not always show."""
        probe = self._compiled.deep_copy()
        return probe.try_consume_tokens(self._first) < len(self._first) or probe.is_error()

    def _go_back(self, output: Sequence[int]) -> None:
        consumed, same = self._consumed, self._num_same
        while same < min(len(consumed), len(output)) and consumed[same] == output[same]:
            same += 1
        if same < len(consumed):
            self._machine.rollback(len(consumed) - same)
            del consumed[same:]
            self._machine.compute_bitmask()  # replaces the matcher's cached mask, which belongs to another text

    def _consume(self, tokens: Sequence[int], most: int) -> bytes:
        """Consume ``tokens``, at most ``most`` a step; returns the mask after them, or after the last one that is allowed."""
        mask = b"" if tokens else self._machine.compute_bitmask()
        for begin in range(0, len(tokens), most):
            step = list(tokens[begin : begin + most])
            num_consumed = self._machine.try_consume_tokens(step)
            self._consumed += step[:num_consumed]
            mask = self._machine.compute_bitmask()  # this also fuels the next step
            if num_consumed < len(step):
                break
        return mask


def _unpack(masks: Sequence[bytes], num_rows: int, vocab_size: int) -> NDArray[np.bool_]:
    """Bits to booleans. Rows beyond the masks allow everything; ids beyond a mask are forbidden."""
    bits = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), -1)
    bits = np.unpackbits(bits, axis=1, count=min(vocab_size, 8 * bits.shape[1]), bitorder="little").view(np.bool_)
    allowed = np.zeros((num_rows, vocab_size), dtype=np.bool_)
    allowed[len(masks) :] = True
    allowed[: len(masks), : bits.shape[1]] = bits
    return allowed


def source(structured: Structured) -> str:
    """The grammar in llguidance's Lark, with a rule `start`; raises whatever the parser of GBNF does."""
    if structured.json_object:
        return UNFORCED + _json({"type": "object"})
    if structured.json_schema is not None:
        return UNFORCED + _json(json.loads(structured.schema))
    if structured.regex is not None:
        return UNFORCED + _regex(structured.regex)
    if structured.choice:
        return UNFORCED + _regex("|".join(map(_escape, structured.choice)))
    assert structured.grammar is not None
    return UNFORCED + any_to_lark(structured.grammar)


def compilable(schema: Any) -> Any:
    """A JSON schema as llguidance takes it.

    The look-ahead in Pydantic's patterns for decimals (not only signs and points) is expressed in another way. `uniqueItems` is
    left out, since no grammar can express it, see `unenforced`.
    """
    if isinstance(schema, list):
        return [compilable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned = {name: value for name, value in schema.items() if not (name == UNIQUE and isinstance(value, bool))}
    cleaned = {name: value if name in VALUES else compilable(value) for name, value in cleaned.items()}
    pattern = cleaned.get("pattern")
    if isinstance(pattern, str) and pattern.startswith(MORE_THAN_SIGNS):
        cleaned["pattern"] = "^" + pattern.removeprefix(MORE_THAN_SIGNS)
        cleaned["allOf"] = [*cleaned.get("allOf", ()), {"pattern": "[^+.-]"}]
    return cleaned


def unenforced(*structured: Structured | None) -> tuple[str, ...]:
    """Keywords of JSON schemas that are not enforced."""
    schemas = [entry.schema for entry in structured if entry is not None and entry.json_schema is not None]
    return (UNIQUE,) if any(IS_UNIQUE.search(schema) for schema in schemas) else ()


def _json(schema: Any) -> str:
    schema = compilable(schema)
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": JSON_OPTIONS | schema.get("x-guidance", {})}
    return f"start: %json {json.dumps(schema)}"


def _regex(pattern: str) -> str:
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return str(grammar["lark_grammar"])


def _escape(text: str) -> str:
    """A regular expression that matches only ``text``."""
    return "".join(char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def _refusal(structured: Structured, reason: str) -> InvalidRequest:
    where = f"structured.{structured.kind}"
    return InvalidRequest(f"{where} cannot be compiled: {_one_line(reason)}", where)


def _one_line(reason: str) -> str:
    return re.sub(r"\s+", " ", reason).strip()[:300]
