"""Predictions of what a cascade gives: prices of passes, agreement, speeds that follow from them, and layers that suffice."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from cascade import Cascade, SamplingParams
from cascade.agreement import agreement, chat_ids, ranked, record, search, written
from cascade.drafters import make, specs
from cascade.engine.layers import numbers
from cascade.engine.model import Model
from cascade.errors import ConfigError
from cascade.prompts import BUILT_IN, read_prompts
from cascade.scorer import RunnerUp
from cascade.simulation.costs import ACCELERATORS, Load, flat
from cascade.simulation.plan import ALONE, PLANNER, Traffic, chained, predict, recorded_tiers, timelines, toy_tiers
from cascade.simulation.recording import RecordedText, Recording
from tests import small
from tests.cli import run

LLAMA_1B = Load(2_470_000_000, 1_235_000_000, 16, 32_768)  # Llama 3.2 1B in bfloat16
NAMES = ("tiny", "medium", "full")
SHORT = Traffic((1,), prompt_tokens=8, tokens=48, answers=2)
PROMPTS = BUILT_IN[:3]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def recording() -> Recording:
    """What the small models say along the full one's answers."""
    return record(small.paths(), PROMPTS, GREEDY, "float32")


def test_prices_follow_the_data_sheet() -> None:
    """Guards the one published point, and that more memory bandwidth, more ranks and fewer tokens never cost more."""
    h100, h200 = ACCELERATORS["H100"], ACCELERATORS["H200"]
    assert LLAMA_1B.seconds(1, h100) == pytest.approx(1.47e-3, rel=0.01)
    assert LLAMA_1B.seconds(1, h200) < LLAMA_1B.seconds(1, h100)
    free = LLAMA_1B.free_tokens(h100)
    assert LLAMA_1B.seconds(free, h100) == LLAMA_1B.seconds(1, h100) < LLAMA_1B.seconds(2 * free, h100)
    large = Load(140_000_000_000, 70_000_000_000, 80, 327_680)
    assert large.seconds(1, h100, 4) < large.seconds(1, h100) / 3
    profile = LLAMA_1B.profile(h100)
    assert profile.predict(2 * free) == pytest.approx(LLAMA_1B.seconds(2 * free, h100), rel=1e-3)
    assert profile.predict(1, 1000) - profile.predict(1) == pytest.approx(1000 * LLAMA_1B.context_s(h100))


def test_drafts_that_agree_gain_and_others_are_left_out() -> None:
    """Guards the advice: a tier that never agrees must not be recommended, one that always does must be."""
    [good] = predict(toy_tiers(("tiny", "full"), flat(1, 20), (1.0,)), SHORT)
    assert good.best == "tiny → full"
    assert good.over_alone("tiny → full") > 5
    # a draft as dear as its verifier, and nearly always wrong
    [bad] = predict(toy_tiers(("tiny", "full"), flat(20, 20), (0.02,)), SHORT)
    assert bad.over_alone(bad.best) < 1.1
    assert bad.over_alone(PLANNER) > 0.9


def test_shares_that_no_chain_has_are_refused() -> None:
    """Guards against a prediction of something else than was given."""
    assert chained((0.6, 0.8)) == pytest.approx((0.75, 0.8))
    with pytest.raises(ConfigError, match="leave out the one above"):
        chained((0.9, 0.8))
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        chained((0.0,))


def test_agreement_is_that_of_the_texts(recording: Recording) -> None:
    """Guards the measurement: texts are the full model's own, and a model agrees with itself everywhere."""
    with Cascade.from_pretrained(small.paths()[-1:], dtype="float32") as full:
        for text, prompt in zip(recording.texts, PROMPTS, strict=True):
            ids = chat_ids(full.tokenizer, prompt.text)
            assert (list(text.prompt), text.output) == (ids, full.generate(ids, GREEDY).token_ids)
    whole = agreement(recording, 2)
    assert (whole.own, whole.after_error) == (1.0, None)
    shares = [agreement(recording, tier).own for tier in range(3)]
    assert 0 < shares[0] <= shares[1] < 1
    assert shares[0] == recording.shared(0, 2)
    kinds = {text.category for text in recording.texts}
    assert sum(agreement(recording, 0, kind).positions for kind in kinds) == whole.positions


def test_recorded_texts_are_what_is_simulated(recording: Recording) -> None:
    """Guards plans of one's own models: measured tiers give a speed between alone and a token of each tier a pass."""
    tiers = recorded_tiers(NAMES, flat(1, 4, 20), recording, small.VOCAB)
    [prediction] = predict(tiers, Traffic((1,)), recording)
    assert prediction.speeds[ALONE] == pytest.approx(50, rel=0.05)
    assert 1 < prediction.over_alone("medium → full") < 10


def test_corrections_by_a_runner_up_are_prepared() -> None:
    """Guards the share of corrections after which a guess is there already: with right runner-ups nearly all, else none."""
    tokens = [7 + (place * place) % 41 for place in range(64)]
    full = tuple((RunnerUp(token, 0.0),) for token in tokens)
    shares = []
    for runner_ups in (True, False):
        wrong = [(RunnerUp(1, 0.0), *([RunnerUp(token, 0.1)] if runner_ups else [])) for token in tokens]
        below = tuple(wrong[place] if place % 5 == 4 else (*full[place], RunnerUp(2, 9.0)) for place in range(64))
        texts = Recording((RecordedText(tuple(range(40)), (below, full)),) * 2)
        [prediction] = predict(recorded_tiers(("tiny", "full"), flat(2, 20), texts, 64), Traffic((1,)), texts)
        shares.append(prediction.prepared["tiny → full"])
    assert shares[0] > 0.9
    assert shares[1] == 0


@pytest.mark.parametrize("repeats", [False, True])
def test_text_drafters_guess_from_the_text_alone(repeats: bool) -> None:
    """Guards the demo's simulated speed: `suffix` gains where a text repeats itself, and nothing from an earlier answer."""
    tokens = [place % 8 if repeats else (place * 37) % 64 for place in range(64)]
    full, below = (tuple((RunnerUp(token, 0.0),) for token in written) for written in (tokens, [63] * 64))
    texts = Recording((RecordedText(tuple(range(40, 48)), (below, full)),))
    tiers = recorded_tiers(("tiny", "full"), flat(2, 20), texts, 64, make(specs("suffix"), ("suffix",), None))
    (alone,), (drafted,) = (timelines(tiers, texts, drafts=drafts) for drafts in (False, True))
    assert (alone[-1] / drafted[-1] > 2) is repeats


def test_the_commands_measure_and_predict(tmp_path: Path) -> None:
    """Guards the whole way of a user: agreement of models on prompts of theirs, kept, and a plan made of it."""
    tiny, _, full = small.paths()
    prompts, out = tmp_path / "prompts.txt", tmp_path / "measured.json"
    prompts.write_text("def add(a, b):\n")
    options = {"--draft": tiny, "--prompts": prompts, "--max-tokens": 12, "--out": out}
    code, output = run("agreement", full, *(str(word) for pair in options.items() for word in pair))
    assert code == 0, output
    assert len(json.loads(out.read_text())["texts"]) == 1
    code, output = run("plan", full, "--draft", tiny, "--device", "H100", "--measured", str(out), "--load", "1")
    assert code == 0, output
    assert "tiny → full" in output
    assert "measured on 1 answers" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pass-ms", "20", "--pass-ms", "1"], "Say how often the drafts agree"),
        (["--pass-ms", "20", "--pass-ms", "1", "--agreement", "0.5", "--agreement", "0.4"], "give it for each"),
        (["--pass-ms", "0"], "0.0 is not in the range x>0"),
        (["--pass-ms", "20"], "Nothing to compare the full model with"),
        (["--agreement", "0.5"], "Name MODEL"),
        (["nowhere", *["--draft", "none"] * 5, "--agreement", "0.5", "--device", "H100"], "models has 6 entries"),
        (["nowhere", "--draft", "none", "--agreement", "0.5", "--device", "H1000"], "H1000 is not known: one of B200"),
        (["nowhere", "--draft", "none", "--agreement", "0.5"], "--device is given 0 times"),
    ],
)
def test_wrong_plans_are_refused(arguments: list[str], sentence: str) -> None:
    """Guards users against a prediction of something else, and against tracebacks."""
    code, output = run("plan", *arguments)
    assert code in (1, 2)
    assert sentence in " ".join(output.replace("│", " ").split())


def test_models_must_fit_their_devices(tmp_path: Path) -> None:
    """Guards buyers against the speed of a model that its device cannot hold."""
    LlamaConfig(hidden_size=8192, num_hidden_layers=80, dtype="bfloat16").save_pretrained(tmp_path)
    asked = ["plan", tmp_path, "--draft", small.paths()[0], "--agreement", "0.5", "--device", "H100", "--load", "1"]
    code, output = run(*asked)
    assert (code, "Tier full takes 81" in output) == (1, True), output
    code, output = run(*asked, "--device", "L4", "--tensor-parallel-size", "2", "--max-tokens", "16")
    assert (code, "as replicas" in output) == (0, False), output


def test_models_with_other_tokens_are_not_compared(tmp_path: Path) -> None:
    """Guards users against a figure of chance: ids of another tokenizer were compared, or ended in a traceback."""
    code, output = run("agreement", small.little(tmp_path), "--draft", small.paths()[0], "--max-tokens", "4")
    assert (code, "have different tokenizers" in " ".join(output.split())) == (1, True), output


IDLE = (1, 2, 4)  # layers that change nothing; of six
CODE = (
    "def read(path):\n",
    "import os\n\nclass Shape:\n",
    "for name in",
    "def main() -> None:\n",
    "raise ValueError(",
    "x = {",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idle")
    full = small.paths()[-1]
    network = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32)
    with torch.no_grad():
        for layer in IDLE:
            network.model.layers[layer].self_attn.o_proj.weight.zero_()
            network.model.layers[layer].mlp.down_proj.weight.zero_()
    network.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(full).save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in CODE))
    return folder


def test_layers_that_a_model_can_do_without_are_found(folder: Path) -> None:
    """Guards the search, which once kept what was worse: the layers that matter are found, and say all that the model says."""
    code, output = run(
        "layers", str(folder / "model"), "--share", "0.75", "--prompts", str(folder / "prompts.jsonl"), "--max-tokens", "12"
    )
    assert code == 0, output
    layers = numbers(output.split("layers: [")[1].split("]")[0])
    assert {*range(6)} - {*layers} <= {*IDLE}
    assert "1.00" in output


def test_the_agreement_is_that_of_the_tier(folder: Path) -> None:
    """Guards the figure: it is that of the tier as it will be served, read from the checkpoint, along the model's answers."""
    full, prompts = small.paths()[-1], read_prompts(folder / "prompts.jsonl")
    params = SamplingParams(max_tokens=24, temperature=0)
    [found] = search(full, prompts, params, [0.8], 3, dtype="float32")
    sampling = [SamplingParams(max_tokens=24, temperature=0, seed=seed) for seed in range(len(prompts))]
    texts = written(full, prompts, sampling, "float32")[1::2]
    own = ranked(Model.from_pretrained(full, dtype="float32", layers=found.layers), texts, sampling[1::2])
    same = [
        near[0].token == token for text, tier in zip(texts, own, strict=True) for near, token in zip(tier, text[1], strict=True)
    ]
    assert found.agreement == pytest.approx(sum(same) / len(same))
    assert 0 < found.agreement < 1


def test_shares_that_no_layers_have_are_refused(folder: Path) -> None:
    """Guards against a tier of no layers, or of all."""
    for share in ("0.01", "1"):
        code, output = run("layers", str(folder / "model"), "--share", share, "--prompts", str(folder / "prompts.jsonl"))
        assert code == 1
        assert f"share is {float(share):g}: some of the 6 layers take from" in output
