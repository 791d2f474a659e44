"""What a text has to be, as masks over the vocabulary: JSON schemas, regular expressions and grammars.

The work is llguidance's (https://github.com/guidance-ai/llguidance): an Earley parser over a lazily built lexer. Nothing is
precompiled per grammar, the fuel of every step is bounded, and a matcher rolls back, which guesses need.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.hf import from_tokenizer
from torch import Tensor

from cascade.errors import InvalidRequest
from cascade.params import Structured
from cascade.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists for type checkers only

MAX_COMPILED = 256  # grammars remembered
# a space or a new line with its indentation: what models write, and no endless runs of blanks
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,20}"}
# a step that needs more than this, 10 to 20 ms, makes its request fail
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_grammar_size=200_000, verbose_errors=False
)


class Grammars:
    """Compiles for the tokens of ``tokenizer``, each grammar once. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None  # built when first asked for: up to a second with large vocabularies
        self._compiled: OrderedDict[Structured, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, structured: Structured) -> None:
        """Raise `InvalidRequest` with the reason if it cannot be compiled."""
        self.matcher(structured)

    def matcher(self, structured: Structured) -> "Matcher":
        """A matcher at the beginning of a text; raises `InvalidRequest`."""
        with self._lock:
            compiled = self._compiled.get(structured)
            if compiled is None:
                compiled = self._compile(structured)
                self._compiled[structured] = compiled
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structured)
            return Matcher(compiled.deep_copy())

    def _compile(self, structured: Structured) -> LLMatcher:
        end_ids = sorted(self._tokenizer.end_ids)
        if not end_ids:
            raise InvalidRequest("structured is set and the model has no end-of-text token: such texts could not end")
        try:
            source = _source(structured)
        except Exception as error:  # of the parser of GBNF, which raises what it likes
            raise _refusal(structured, str(error)) from None
        compiled = LLMatcher(self._build(end_ids), source, log_level=0, limits=LIMITS)
        if not compiled.is_error():
            compiled.compute_bitmask()  # the first step is the one that builds most
        if compiled.is_error():
            raise _refusal(structured, compiled.get_error())
        return compiled

    def _build(self, end_ids: list[int]) -> LLTokenizer:
        """The vocabulary as bytes, once."""
        if self._vocabulary is None:
            try:
                self._vocabulary = from_tokenizer(self._tokenizer.backend, eos_token=end_ids)
            except Exception as error:  # of kinds of tokenizers that it does not know
                reason = _one_line(str(error))
                raise InvalidRequest(f"structured cannot be honoured with the tokenizer of this model: {reason}") from error
        return self._vocabulary


class Matcher:
    """Follows one text; see `cascade.history.Constraint`."""

    def __init__(self, machine: LLMatcher) -> None:
        self._machine = machine
        self._num_tokens = 0  # of the output that the machine has taken

    def rewind(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` of the output."""
        if self._num_tokens > num_tokens:
            self._machine.rollback(self._num_tokens - num_tokens)
            self._num_tokens = num_tokens
            self._check()

    def allowed(self, output: Sequence[int], guesses: Sequence[int], vocab_size: int) -> Tensor:
        """Which tokens may come behind ``output``, and behind each of ``guesses``: bool ``[1 + guesses, vocab_size]``, CPU.

        Behind a guess that is not allowed everything is: nobody will ask for it. Raises `InvalidRequest` if the grammar takes
        more work than a step may.
        """
        machine = self._machine
        self._num_tokens += machine.try_consume_tokens(list(output[self._num_tokens :]))
        self._check()
        if self._num_tokens < len(output):  # the tier above does not follow the grammar: guess what it likes
            return torch.ones(1 + len(guesses), vocab_size, dtype=torch.bool)
        masks = [machine.compute_bitmask()]
        for guess in guesses:
            if not machine.try_consume_tokens([guess]):
                break
            masks.append(machine.compute_bitmask())
        self._check()
        machine.rollback(len(masks) - 1)
        self._check()
        return _unpack(masks, 1 + len(guesses), vocab_size)

    def _check(self) -> None:
        if self._machine.is_error():
            reason = _one_line(self._machine.get_error())
            raise InvalidRequest(f"structured takes more work than a token may: ask for something simpler ({reason})")


def _unpack(masks: Sequence[bytes], num_rows: int, vocab_size: int) -> Tensor:
    """Bits to booleans; rows and ids beyond the masks are allowed and forbidden."""
    bits = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), -1)
    known = np.unpackbits(bits, axis=1, count=min(vocab_size, 8 * bits.shape[1]), bitorder="little").view(np.bool_)
    allowed = torch.zeros(num_rows, vocab_size, dtype=torch.bool)
    allowed[len(masks) :] = True
    allowed[: len(masks), : known.shape[1]] = torch.from_numpy(known)
    return allowed


def _source(structured: Structured) -> str:
    """The grammar in llguidance's own words."""
    if structured.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)
    if structured.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(structured.schema, defaults=JSON_OPTIONS)
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice:
        return LLMatcher.grammar_from_regex("|".join(map(_escape, structured.choice)))
    assert structured.grammar is not None
    return LLMatcher.grammar_from_lark(any_to_lark(structured.grammar))


def _escape(text: str) -> str:
    """A regular expression that matches ``text`` alone."""
    return "".join(char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def _refusal(structured: Structured, reason: str) -> InvalidRequest:
    return InvalidRequest(f"structured.{structured.kind} cannot be compiled: {_one_line(reason)}")


def _one_line(reason: str) -> str:
    return re.sub(r"\s+", " ", reason).strip()[:300]
