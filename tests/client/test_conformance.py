"""Every parameter, over both protocols, with and without drafts, as `docs/reference/parameters.md` says."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from cascade.client import Client
from cascade.client.exchange import encode_request
from cascade.client.rpc import stub_of
from cascade.params import Handling, SamplingParams, Speculation, Structured
from cascade.scorer import Row
from tests.doors import House, serving
from tests.http.test_http import PROMPT, ask
from tests.tier.test_tier import CountingModel

ROOT = Path(__file__).parents[2]
# six words and an end are far likelier than all other tokens: so texts repeat themselves, and end by themselves
LIKELY = {0: 18.0, 322: 20.0, 306: 20.0, 563: 20.0, 626: 20.0, 273: 20.0, 538: 20.0}
PLAIN: dict[str, Any] = {"max_tokens": 24, "seed": 8, "logit_bias": LIKELY}
ADAPTER = "red"
CHOSEN: dict[str, dict[str, Any]] = {  # values that are not the defaults, and that show in the text
    "max_tokens": {"max_tokens": 7},
    "min_tokens": {"min_tokens": 20},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.5},
    "seed": {"seed": 12},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "logit_bias": {"logit_bias": LIKELY | {322: -20.0}},
    "stop": {"stop": (" y", "never")},
    "stop_token_ids": {"stop_token_ids": (626,)},
    "ignore_eos": {"ignore_eos": True},
    "structured": {"structured": Structured(regex="( name| self){3,5}")},
    "adapter": {"adapter": ADAPTER},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"logprobs": 2, "prompt_logprobs": 2},
}
HANDLED: dict[str, dict[str, Any]] = {
    "priority": {"priority": -5},
    "cache_salt": {"cache_salt": "mine"},
    "train": {"train": False},
}
DRAFTED: dict[str, dict[str, Any]] = {
    "tiers": {"tiers": ("tiny",)},
    "window": {"window": 3},
    "branches": {"branches": 0},
}
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
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}
    drafts = {name: said.pop(name) for name in DRAFTED if name in said}
    if isinstance(structured := said.get("structured"), Structured):
        said["structured"] = {"regex": structured.regex}
    if said.pop("prompt_logprobs", None) is not None:
        said["echo"] = True
    return {"prompt": PROMPT, "speculation": {"mode": mode, **drafts}, **said}


def answers(served: House, params: dict[str, Any]) -> list[tuple[str, str]]:
    """Texts and how they ended: gRPC whole and in pieces, HTTP, each in every mode."""
    sampling = SamplingParams(**{name: value for name, value in params.items() if name not in HANDLED | DRAFTED})
    handling = Handling(**{name: params[name] for name in HANDLED if name in params})
    found = []
    with Client(served.grpc) as client, grpc.insecure_channel(served.grpc) as channel:
        for mode in ("off", "auto"):
            drafts = Speculation(mode, **{name: params[name] for name in DRAFTED if name in params})
            whole = stub_of(channel).Complete(encode_request(PROMPT, sampling, drafts, handling))
            found.append((whole.text, whole.finish.reason))
            *_, last = client.stream(PROMPT, sampling, drafts, handling)
            found.append((last.completion.text, str(last.completion.finish_reason)))
            for logprobs, prompt in (
                (whole.tokens[0].HasField("logprob"), whole.prompt),
                (last.completion.logprobs, last.completion.prompt),
            ):
                assert (bool(logprobs), bool(prompt)) == ("logprobs" in params, "prompt_logprobs" in params)
            status, _, answer = ask(served, "/v1/completions", body(params, mode))
            assert status == 200, answer
            choice = answer["choices"][0]
            text = choice["text"].removeprefix(PROMPT) if "prompt_logprobs" in params else choice["text"]
            found.append((text, choice["finish_reason"]))
            assert (choice["logprobs"] is not None) == ("logprobs" in params)
    return found


@pytest.fixture(scope="module")
def plain(served: House) -> tuple[str, str]:
    """The text without any of them, and how it ends."""
    [plain] = set(answers(served, PLAIN))
    return plain


@pytest.mark.parametrize("name", CHOSEN | HANDLED | DRAFTED)
def test_a_parameter_means_the_same_everywhere(served: House, plain: tuple[str, str], name: str) -> None:
    """Guards every parameter on both protocols: with drafts and without, whole and cut, the text is the same, and another
    one than without the parameter, unless it is one that must not change it."""
    [chosen] = set(answers(served, PLAIN | (CHOSEN | HANDLED | DRAFTED)[name]))
    assert (chosen == plain) == (name in SILENT)


def test_every_parameter_is_tried_and_told() -> None:
    """Guards parameters that no test here sends, and what the page says of the text with each of them."""
    page = (ROOT / "docs/reference/parameters.md").read_text(encoding="utf-8").split("## Order")[0]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    told = {row[0].strip(" `"): row[-1].strip() for row in rows}
    elsewhere = {"mode"}  # answers are compared with and without drafts anyway
    assert set(told) == {*elsewhere, *CHOSEN, *HANDLED, *DRAFTED}
    assert {name for name, changes in told.items() if changes == "no"} == SILENT | elsewhere
