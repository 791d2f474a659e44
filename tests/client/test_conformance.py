"""Every parameter, over both protocols, with and without drafts, as `docs/reference/parameters.md` says; and the protocols."""

import importlib.metadata
import importlib.resources
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_tools import protoc

from cascade.client import Client
from cascade.client.exchange import encode_request
from cascade.client.rpc import stub_of
from cascade.params import Handling, SamplingParams, Speculation, Structured
from cascade.scorer import Row
from tests.http.test_http import PROMPT, ask
from tests.in_process import House, serving
from tests.tier.test_tier import CountingModel

ROOT = Path(__file__).parents[2]
# six words and an end are far likelier than all other tokens: so texts repeat themselves, and end by themselves
LIKELY = {0: 18.0, 322: 20.0, 306: 20.0, 563: 20.0, 626: 20.0, 273: 20.0, 538: 20.0}
PLAIN: dict[str, Any] = {"max_tokens": 24, "seed": 8, "logit_bias": LIKELY}
ADAPTER = "red"
# values that are not the defaults, and that show in the text
SAMPLED = {"max_tokens": 7, "min_tokens": 20, "temperature": 0.3, "top_k": 2, "top_p": 0.3, "min_p": 0.5, "seed": 12}
PENALTIES = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 5.0, "logprobs": 2}
ENDS = {"stop": (" y", "never"), "stop_token_ids": (626,), "ignore_eos": True}
FORMS = {"structured": Structured(regex="( name| self){3,5}"), "adapter": ADAPTER, "logit_bias": LIKELY | {322: -20.0}}
ALONE: dict[str, Any] = {**SAMPLED, **PENALTIES, **ENDS, **FORMS}
CHOSEN = {name: {name: value} for name, value in ALONE.items()} | {"prompt_logprobs": {"logprobs": 2, "prompt_logprobs": 2}}
TOGETHER: dict[str, dict[str, Any]] = {  # what looks at the text before a place, beside each other
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logprobs": 3, "min_tokens": 9},
    "stop behind min_tokens": {"stop": (" y x", "y z", " x"), "min_tokens": 6, "logprobs": 0},
    "half a character": {"logit_bias": dict.fromkeys(range(150, 256), 30.0), "stop": ("é",), "max_tokens": 12},
    "json": {"structured": Structured(regex='\\{"[a-z]{9}": [0-9]{5}\\}'), "presence_penalty": 1.0, "logit_bias": {}},
}
HANDLED: dict[str, dict[str, Any]] = {
    "priority": {"priority": -5},
    "cache_salt": {"cache_salt": "mine"},
    "train": {"train": False},
}
DRAFTED: dict[str, dict[str, Any]] = {"tiers": {"tiers": ("tiny",)}, "window": {"window": 3}, "branches": {"branches": 0}}
SILENT = {"logprobs", "prompt_logprobs", *HANDLED, *DRAFTED}  # never change a text


class Adapted(CountingModel):
    """A full tier that speaks another language with its adapter."""

    def _score(self, row: Row) -> list[int]:
        plain = self.seed
        self.seed = plain + (row.params.adapter == ADAPTER and self.agreement == 1)
        try:
            return super()._score(row)
        finally:
            self.seed = plain


served = serving(model=Adapted, full={"engine_kwargs": {"engine": "vllm", "lora_modules": {ADAPTER: "red/adapter"}}})


def body(params: dict[str, Any], mode: str) -> dict[str, Any]:
    """The same as an OpenAI client says it."""
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}
    drafts = {name: fields.pop(name) for name in DRAFTED if name in fields}
    if isinstance(structured := fields.get("structured"), Structured):
        fields["structured"] = {"regex": structured.regex}
    if fields.pop("prompt_logprobs", None) is not None:
        fields["echo"] = True
    return {"prompt": PROMPT, "speculation": {"mode": mode, **drafts}, **fields}


def answers(served: House, params: dict[str, Any]) -> list[tuple[str, str]]:
    """Texts and how they ended: gRPC whole, in pieces and gone on with where a stream broke off, HTTP, each in every mode."""
    sampling = SamplingParams(**{name: value for name, value in params.items() if name not in HANDLED | DRAFTED})
    handling = Handling(**{name: params[name] for name in HANDLED if name in params})
    ends = []
    with Client(served.grpc) as client, grpc.insecure_channel(served.grpc) as channel:
        for mode in ("off", "auto"):
            drafts = Speculation(mode, **{name: params[name] for name in DRAFTED if name in params})
            whole = stub_of(channel).Complete(encode_request(PROMPT, sampling, drafts, handling))
            ends.append((whole.text, whole.finish.reason))
            pieces = list(client.stream(PROMPT, sampling, drafts, handling))
            last = pieces[-1].completion
            ends.append((last.text, str(last.finish_reason)))
            begun, request = pieces[: len(pieces) // 2], encode_request(PROMPT, sampling, drafts)
            if had := [id for piece in begun for id in piece.token_ids]:
                request.resume.token_ids[:] = had
                rest = list(stub_of(channel).Generate(request))
                text = "".join(piece.text for piece in (*begun, *rest))
                assert sum(len(piece.tokens) for piece in rest) == len(whole.tokens) - len(had)
                assert all(token.HasField("logprob") for piece in rest for token in piece.tokens) or "logprobs" not in params
                ends.append((text, rest[-1].finish.reason))
            assert len(last.logprobs) == len(last.token_ids) * ("logprobs" in params)
            assert all(token.HasField("logprob") == ("logprobs" in params) for token in whole.tokens)
            assert bool(whole.prompt) == bool(last.prompt) == ("prompt_logprobs" in params)
            status, _, answer = ask(served, "/v1/completions", body(params, mode))
            assert status == 200, answer
            choice = answer["choices"][0]
            text = choice["text"].removeprefix(PROMPT) if "prompt_logprobs" in params else choice["text"]
            ends.append((text, choice["finish_reason"]))
            assert (choice["logprobs"] is not None) == ("logprobs" in params)
    return ends


@pytest.fixture(scope="module")
def plain(served: House) -> tuple[str, str]:
    """The text without any of them, and how it ends."""
    [plain] = set(answers(served, PLAIN))
    return plain


@pytest.mark.parametrize("name", CHOSEN | HANDLED | DRAFTED)
def test_a_parameter_means_the_same_everywhere(served: House, plain: tuple[str, str], name: str) -> None:
    """Guards every parameter on both protocols: the text is the same with drafts and without, and changes if it should."""
    [chosen] = set(answers(served, PLAIN | (CHOSEN | HANDLED | DRAFTED)[name]))
    assert (chosen == plain) == (name in SILENT)


@pytest.mark.parametrize("name", TOGETHER)
def test_parameters_mean_the_same_beside_each_other(served: House, name: str) -> None:
    """Guards all that counts from the prompt or looks back, also across the seam of a stream that broke off."""
    assert len({*answers(served, PLAIN | TOGETHER[name])}) == 1


def test_every_parameter_is_tried_and_told() -> None:
    """Guards parameters that no test here sends, and what the page says of the text with each of them."""
    page = (ROOT / "docs/reference/parameters.md").read_text(encoding="utf-8").split("## Order")[0]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    changes = {row[0].strip(" `"): row[-1].strip() for row in rows}
    elsewhere = {"mode"}  # answers are compared with and without drafts anyway
    assert set(changes) == {*elsewhere, *CHOSEN, *HANDLED, *DRAFTED}
    assert {name for name, change in changes.items() if change == "no"} == SILENT | elsewhere


PROTOS = ROOT / "protos"
FILES = sorted(PROTOS.rglob("*.proto"))
DEFINITION = re.compile(r"(service|message|enum|rpc)\s+\w+|(optional |repeated )?[\w.]+ \w+ = \d+;")


def undocumented(text: str) -> list[str]:
    """Definitions that have no comment in the line above them."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for above, line in zip(["", *lines], lines, strict=False) if DEFINITION.match(line) and above[:2] != "//"]


def test_generated_code_is_that_of_the_protos(tmp_path: Path) -> None:
    """Guards against protos that were changed without `make proto`, and against generated code that was changed by hand."""
    builtin = importlib.resources.files("grpc_tools") / "_proto"
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    sources = [str(path.relative_to(PROTOS)) for path in FILES]
    assert protoc.main(["protoc", f"-I{PROTOS}", f"-I{builtin}", *outs, *sources]) == 0
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    assert len(generated) == 2 * len(FILES)
    package = ROOT / "cascade" / "v1"
    kept = {path.relative_to(ROOT): path.read_text() for path in package.glob("*.py*") if path.name != "__init__.py"}
    stale = [str(path) for path in generated.keys() | kept.keys() if generated.get(path) != kept.get(path)]
    assert not stale, f"run `make proto` with grpcio-tools {importlib.metadata.version('grpcio-tools')}: {stale} differ"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_everything_is_explained(path: Path) -> None:
    """Guards the protocol as documentation: no service, call, message or field without a comment above it."""
    text = path.read_text()
    assert len(DEFINITION.findall(text)) > 20
    assert undocumented(text) == []
