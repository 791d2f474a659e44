"""Sampling parameters of requests that give none: the model's generation config, over every protocol."""

import json
from pathlib import Path
from typing import Any

from cascade import Client, SamplingParams
from tests.http.test_http import ask
from tests.in_process import house

GIVEN = {"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 12}
SAME = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=12)
OWN = SamplingParams(temperature=1, repetition_penalty=1, max_tokens=7, seed=5)
PROMPT = "def read(path):"


def test_every_protocol_takes_the_models_defaults_and_a_requests_own_values_win(tmp_path: Path) -> None:
    """Guards against defaults that one protocol knows and another does not, and against defaults in place of what is asked."""
    (tmp_path / "generation_config.json").write_text(json.dumps(GIVEN))
    own = {"temperature": 1, "repetition_penalty": 1, "max_tokens": 7, "seed": 5}
    with house(full={"engine_kwargs": {"generation_config": str(tmp_path)}}) as served:

        def texts(**sampling: Any) -> str:
            return str(ask(served, "/v1/completions", {"prompt": PROMPT, **sampling})[2]["choices"][0]["text"])

        with Client(served.grpc) as client:
            assert client.describe().defaults == SAME
            expected = client.generate(PROMPT, SAME)
            assert expected.text == client.generate(PROMPT).text == texts()
            assert len(expected.token_ids) == 12
            assert client.generate(PROMPT, OWN).text == texts(**own) != expected.text
            assert client.generate(PROMPT, OWN).stats.completion_tokens == 7
        [model] = ask(served, "/v1/models")[2]["data"]
        assert model["sampling"] == {"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 12}
        served.settle()


def test_answers_without_a_limit_fit() -> None:
    """Guards texts where our default is more than the server writes, or the context leaves: that was refused."""
    with house(limits={"max_tokens": 5}) as served, Client(served.grpc) as client:
        status, _, answer = ask(served, "/v1/completions", {"prompt": PROMPT, "ignore_eos": True})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        assert client.generate(PROMPT).stats.completion_tokens <= 5
        assert client.generate(PROMPT, client.describe().defaults).stats.completion_tokens <= 5  # as the command line asks
        full = [40] * (served.router.model.context_len - 2)
        assert client.generate(full).stats.completion_tokens <= 2
        served.settle()
