"""Structured output: every text is what was asked for, and the full model's own, whatever the drafts."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import AddedToken
from transformers import AutoTokenizer

from cascade import Cascade, InvalidRequest, SamplingParams, Speculation, Structured
from cascade.engine import grammar as module
from cascade.engine.grammar import Grammars, Matcher
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from tests import small
from tests.architectures import build
from tests.cases import examples
from tests.engine.sampling.test_logits_processors import Babbler, all_accepted

CONTEXT = 512
VOCAB = 4096  # of the small models's tokenizer
PROMPT = "config = "


def record(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


POINT = record(x={"type": "integer", "minimum": -9, "maximum": 9}, on={"type": "boolean"})
PERSON = {"$defs": {"point": POINT}} | record(
    name={"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
    age={"type": "integer", "minimum": 0, "maximum": 130},
    tags={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
)
SUMS = """
root ::= term (("+" | "-") term){1,3}
term ::= [0-9]{1,2} | "(" [a-z] "*" [0-9] ")"
"""
LARK = """
start: "SELECT " column ("," " "? column){0,2} " FROM " table
column: /[a-z]{1,5}/ | "*"
table: "users" | "orders"
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(small.paths()[-1])


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


@pytest.fixture(scope="module")
def cascades(tokenizer: Tokenizer) -> Iterator[list[Cascade]]:
    """Random networks, which left alone say nothing that anybody wants; below the full one they err, or babble."""
    tiny, medium, full = (Model(build("llama", seed, vocab_size=VOCAB, max_position_embeddings=CONTEXT)) for seed in (1, 2, 3))
    with (
        Cascade([tiny, medium, full], tokenizer) as erring,
        Cascade([tiny, Babbler(VOCAB, context_len=CONTEXT), full], tokenizer) as babbling,
        Cascade([full, full, full], tokenizer) as agreeing,
    ):
        yield [erring, babbling, agreeing]


def valid(structured: Structured, text: str) -> bool:
    """By judges that have nothing to do with the grammar library."""
    if structured.json_schema is not None:
        jsonschema.validate(json.loads(text), json.loads(structured.schema))
        return True
    if structured.regex is not None:
        return re.fullmatch(structured.regex, text) is not None
    if structured.choice:
        return text in structured.choice
    if structured.grammar == SUMS:
        term = r"([0-9]{1,2}|\([a-z]\*[0-9]\))"
        return re.fullmatch(rf"{term}([+-]{term}){{1,3}}", text) is not None
    column = r"([a-z]{1,5}|\*)"
    return re.fullmatch(rf"SELECT {column}(, ?{column}){{0,2}} FROM (users|orders)", text) is not None


BIASED = {"min_tokens": 480, "logit_bias": {5: 100.0, 0: 100.0}, "repetition_penalty": 1.5, "logprobs": 1}
ASKED: dict[str, dict[str, Any]] = {
    "schema": {"structured": Structured(json_schema=PERSON)},
    "regex": {"structured": Structured(regex=r"\+[0-9]{2} \([0-9]{2,4}\) [0-9]{3}-[0-9]{4}")},
    "choice": {"structured": Structured(choice=("yes", "no", "yes, but", "né 日本\n"))},
    "gbnf": {"structured": Structured(grammar=SUMS)},
    "lark, with other parameters": {"structured": Structured(grammar=LARK), **BIASED},
}


@pytest.mark.parametrize("kind", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.3])
def test_texts_are_valid_and_the_full_models(cascades: list[Cascade], kind: dict[str, Any], temperature: float) -> None:
    """Guards validity and losslessness at once, and the order of masks: no bias makes a text that was not asked for."""
    params = SamplingParams(max_tokens=480, temperature=temperature, seed=1, **kind)
    alone = cascades[0].generate(PROMPT, params, Speculation("off"))
    assert alone.finish_reason == "stop"
    assert valid(kind["structured"], alone.text)
    assert len(alone.logprobs) == (len(alone.token_ids) if params.logprobs else 0)
    for cascade in cascades:
        for tiers, window in ((("tiny",), 6), (("tiny", "medium"), 4)):
            speculation = Speculation(tiers=tiers, window=window)
            assert cascade.generate(PROMPT, params, speculation).token_ids == alone.token_ids


@pytest.mark.usefixtures("always_draft")
def test_constrained_drafts_are_accepted(cascades: list[Cascade]) -> None:
    """Guards the lower tiers' masks: without them the text is right and hardly a guess is."""
    params = SamplingParams(max_tokens=480, temperature=1.0, seed=1, **ASKED["schema"])
    tiers = tuple(tier.name for tier in cascades[2].tiers[:-1])
    speculation = Speculation(tiers=tiers, branches=0, window=6)
    all_accepted(lambda: cascades[2].generate(PROMPT, params, speculation).stats.edges, 10)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=5)


@settings(max_examples=examples(0.2))
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), seed=st.integers(0, 999))
def test_a_matcher_allows_exactly_the_grammar(grammars: Grammars, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
    """Guards escapes, and masks under guesses and rollback: each position's is that of the text with the guesses before it."""
    rng = random.Random(seed)
    structured = Structured(choice=tuple(texts))
    matcher = grammars.matcher(structured)
    [end] = tokenizer.end_ids
    output: list[int] = []
    while not output or output[-1] != end:
        right = [token for token in tokenizer.encode_part(texts[0])[len(output) :] if rng.random() < 0.9]
        ahead = [*right, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 3)))]
        allowed = matcher.allowed(output, ahead, VOCAB + 5)
        assert allowed.shape == (1 + len(ahead), VOCAB + 5)
        assert not allowed[0, VOCAB:].any()
        for i, guess in enumerate(ahead[: ahead.index(end)] if end in ahead else ahead):
            if not allowed[i, guess]:
                assert allowed[i + 1 :].all(), "nobody asks what comes after it"
                break
            [mask] = grammars.matcher(structured).allowed([*output, *ahead[: i + 1]], [], VOCAB)
            assert np.array_equal(allowed[i + 1, :VOCAB], mask)
        token = rng.choice(allowed[0].nonzero()[0].tolist())
        assert matcher.allowed(output, [token], VOCAB)[1].any() or token == end
        output.append(token)
        if rng.random() < 0.2 and output[-1] != end:
            output = output[: rng.randint(0, len(output))]
            matcher.rewind(len(output))
    spelt = tokenizer.decode(output[:-1], skip_special_tokens=False)
    assert spelt in texts


BOMB = "(a{1,9999}){1,9999}" * 40  # no lexer gets far into it
MARKED = 'x <tool_call>"y'
SPELT = [
    Structured(choice=(MARKED,)),
    Structured(regex=re.escape(MARKED)),
    Structured(json_schema=json.dumps({"const": MARKED})),
    Structured(grammar='start: "x <tool_call>" /["]y/'),
    Structured(grammar='root ::= "x <tool_call>" "\\"y"'),
]


@pytest.mark.parametrize("special", [False, True])
def test_enforced_words_may_be_those_of_added_tokens(special: bool, tmp_path: Path) -> None:
    """Guards texts in which a token named like a special one comes next: it was the only one allowed, and refused."""
    plain = AutoTokenizer.from_pretrained(small.paths()[-1])
    plain.add_tokens([AddedToken("<tool_call>", special=special, normalized=False)], special_tokens=special)
    plain.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    grammars = Grammars(tokenizer)
    for structured in SPELT:
        matcher, written = grammars.matcher(structured), list[int]()
        while plain.eos_token_id not in written:
            assert len(written) < 40
            written.append(int(matcher.allowed(written, (), len(plain))[0].nonzero()[0][-1]))
        assert plain.decode(written[:-1]) == (json.dumps(MARKED) if structured.json_schema else MARKED)
    with pytest.raises(InvalidRequest, match="no end-of-text token"):
        Grammars(replace(tokenizer, end_ids=frozenset())).check(SPELT[0])


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (Structured(regex="[a-c"), "structured.regex cannot be compiled"),
        (Structured(json_schema="{"), "structured.json_schema cannot be compiled"),
        (Structured(json_schema={"type": "foo"}), "structured.json_schema cannot be compiled.*foo"),
        (Structured(grammar="start: missing"), "structured.grammar cannot be compiled"),
        (Structured(grammar='root ::= "a'), "structured.grammar cannot be compiled"),
        (Structured(json_schema="[" * 60_000), "structured.json_schema cannot be compiled"),
        (Structured(regex=BOMB), "structured takes too much work for one token"),
    ],
    ids=lambda value: value.kind if isinstance(value, Structured) else "",
)
def test_bad_grammars_are_refused(cascades: list[Cascade], structured: Structured, words: str) -> None:
    """Guards tiers against grammars that do not compile or whose steps explode, and clients against tracebacks."""
    with pytest.raises(InvalidRequest, match=words) as error:
        cascades[0].generate(PROMPT, SamplingParams(max_tokens=50, temperature=0, structured=structured))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert all(tier.healthy for tier in cascades[0].tiers)
    assert cascades[0].generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)).token_ids


LEXED = Structured(regex="[0-9]{0,9}(x|y" + BOMB + ")")
PARSED = Structured(grammar='start: n{0,9} ("x" | "y" b)\nn: /[0-9]/\nb: c | b b | b b b\nc: /[a-z ]/')
FEW = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=2400, max_grammar_size=200_000, verbose_errors=False
)


def written(matcher: Matcher, ids: Sequence[int], guesses: random.Random | None, seed: int) -> tuple[list[int], str]:
    """A text of own tokens, of ``ids`` with the end first, row by row as tiers write them; and the error that ended it."""
    output: list[int] = []
    while len(output) < 40 and ids[0] not in output:
        drafts = [] if guesses is None else [guesses.choice(ids[1:]) for _ in range(guesses.randint(0, 5))]
        matcher.rewind(max(0, len(output) - 1))
        try:
            masks = matcher.allowed(output, drafts, VOCAB)
        except InvalidRequest as error:
            return output, str(error)
        for place, mask in enumerate(masks):
            possible = [token for token in ids if mask[token]] or mask.nonzero()[0].tolist()
            output.append(random.Random(hash((seed, len(output)))).choice(possible))
            if place == len(drafts) or len(output) == 40 or output[-1] != drafts[place]:
                break
    return output, ""


@pytest.mark.parametrize("structured", [LEXED, PARSED], ids=["lexer", "parser"])
def test_a_limit_behind_a_wrong_guess_changes_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, structured: Structured
) -> None:
    """Guards losslessness where a limit is hit: text and error are those without drafts, for others with that grammar, too."""
    monkeypatch.setattr(module, "LIMITS", FEW)
    [end] = tokenizer.end_ids
    ids = [end, *(tokenizer.encode(char)[-1] for char in "12xya")]
    errors = []
    for seed in range(6):
        text, error = written(Grammars(tokenizer).matcher(structured), ids, None, seed)
        shared = Grammars(tokenizer)
        other = shared.matcher(structured)
        for draft in range(2):
            assert written(shared.matcher(structured), ids, random.Random(draft), seed) == (text, error)
        assert written(other, ids, random.Random(9), seed) == (text, error)
        errors.append(error)
    assert "" in errors
    assert any("too much work for one token" in error for error in errors)


def test_only_the_last_grammars_are_remembered(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory against clients that send ever new grammars, and passes against one that is compiled each time."""
    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    grammars, compiled = Grammars(tokenizer), list[Structured]()
    original = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda structured: compiled.append(structured) or original(structured))
    regexes = [Structured(regex=f"a{{{number}}}") for number in range(1, 5)]
    for structured in (*regexes, regexes[1], regexes[0]):
        grammars.matcher(structured)
    assert compiled == [*regexes, regexes[0]]
