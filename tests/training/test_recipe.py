"""`cascade distill`, from a model to a folder that others load."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from cascade.cli.main import main
from cascade.engine.draft_vocab import FILE
from cascade.training import recipe
from cascade.training.text import Shard
from tests import small
from tests.training.test_training import CHAT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(Path(small.paths()[0]) / name)
    tokenizer = AutoTokenizer.from_pretrained(small.paths()[0])
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


def distill(teacher: str, out: Path, *more: str, size: tuple[str, ...] = ("--cost", "0.6"), code: int = 0) -> str:
    command = ["distill", "--model", teacher, "--out", str(out), *size, "--rows", "16", "--max-len", "64", *more]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "data.txt").write_text("def f(x):\n    return x\n" * 400)
    return str(tmp_path / "data.txt")


def test_distilling_makes_an_ordinary_folder_and_goes_on(teacher: str, tmp_path: Path) -> None:
    """Guards the whole way, answers of the student's own, and a second call with more time: it must not begin anew."""
    out = tmp_path / "student"
    shown = distill(teacher, out, "--hours", "0.0003")
    assert "at this share of held-out positions" in shown
    student, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert student.dtype is torch.bfloat16
    whole = AutoModelForCausalLM.from_pretrained(teacher)
    assert student.num_parameters() < whole.num_parameters()
    assert student.generation_config.eos_token_id == whole.generation_config.eos_token_id
    assert tokenizer.chat_template == CHAT
    assert "| tokens learned" in (out / "README.md").read_text()
    answers = Shard.load(tmp_path / "student.work" / "student.answers" / "00000.npz")
    assert len(answers.ids)  # what the teacher says of them
    vocabulary = json.loads((out / FILE).read_text())
    assert len({*vocabulary}) == student.config.draft_vocab_size == -(-whole.config.vocab_size // 4)
    assert whole.generation_config.eos_token_id in vocabulary
    for text, prompt_len in enumerate(answers.prompts):
        assert {*answers.tokens[answers.span(text)][prompt_len:].tolist()} <= {*vocabulary}  # the student wrote it
    before = torch.load(tmp_path / "student.work" / "student.pt", weights_only=True)["numbers"]
    after = before
    for hours in ("0.0006", "0.002", "0.006", "0.02"):  # a busy machine takes no step in the first
        if after["step"] == before["step"]:
            distill(teacher, out, "--hours", hours)
            assert json.loads((out / FILE).read_text()) == vocabulary
            after = torch.load(tmp_path / "student.work" / "student.pt", weights_only=True)["numbers"]
    assert after["step"] > before["step"] > 0
    assert after["seconds"] > before["seconds"]
    assert not list(tmp_path.rglob("*partial*"))
    refused = distill(teacher, out, size=("--start", str(out)), code=1)  # it would go on with what the first call learnt
    assert "belongs to another student" in refused


def test_an_earlier_student_goes_on_with_given_text(teacher: str, tmp_path: Path, data: str) -> None:
    """Guards weeks of training whose work folder is gone, and the text of files: neither may be made anew."""
    whole = AutoModelForCausalLM.from_pretrained(teacher).config
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12}
    tokens = {name: getattr(whole, name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_key_value_heads=2)).save_pretrained(tmp_path / "one")
    start = ("--start", str(tmp_path / "one"))
    distill(teacher, tmp_path / "two", "--hours", "0.0003", "--data", data, size=start)
    card = (tmp_path / "two" / "README.md").read_text()
    assert "an earlier student" in card
    assert "of the given files" in card
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).config for name in ("one", "two"))
    assert (first.hidden_size, first.num_hidden_layers) == (second.hidden_size, second.num_hidden_layers)


def test_given_prompts_are_answered(teacher: str, tmp_path: Path) -> None:
    """Guards drafts for known traffic: prompts that are left out, lose their turns, or are the only thing that is learnt."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f"}\nreturn x\n' + "x " * 999)
    distill(teacher, tmp_path / "s", "--hours", "0.0003", "--prompts", str(tmp_path / "prompts.jsonl"))
    texts = Shard.load(tmp_path / "s.work" / "text" / "00000.npz")
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    prompts = [tokenizer.decode(texts.tokens[texts.span(n)][:prompt]) for n, prompt in enumerate(texts.prompts)]
    judging = {f"<|user|>{text}\n<|assistant|>": judges for text, judges in (("def f", True), ("return x", False))}
    assert {*zip(prompts, texts.held_out.tolist(), strict=True)} == {*judging.items()}
    assert (np.diff(texts.starts) > texts.prompts).all()
    assert "of given prompts and the teacher's answers" in (tmp_path / "s" / "README.md").read_text()
    (tmp_path / "prompts.jsonl").write_text("x " * 999)
    refused = distill(teacher, tmp_path / "t", "--prompts", str(tmp_path / "prompts.jsonl"), code=1)
    assert "has 0 prompts of at most 60 tokens" in refused


def test_layers_are_healed(teacher: str, tmp_path: Path, data: str) -> None:
    """Guards layers of a model that learn to do without the others: they begin as what they are, with all tokens."""
    distill(teacher, tmp_path / "cut", "--hours", "0.0003", "--data", data, size=("--layers", "0,2"))
    assert "it began as | layers 0, 2 of the teacher" in (tmp_path / "cut" / "README.md").read_text()
    student, whole = (AutoModelForCausalLM.from_pretrained(folder).model.layers for folder in (tmp_path / "cut", teacher))
    assert len(student) == 2
    for place, layer in enumerate((0, 2)):
        own, original = (part.mlp.down_proj.weight.float() for part in (student[place], whole[layer]))
        assert torch.cosine_similarity(own.flatten(), original.flatten(), 0) > 0.99
        assert not torch.equal(own, original)


def test_files_are_read_on_where_a_run_was_killed(
    teacher: str, tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards text behind the place where a run was interrupted: it was never read."""
    monkeypatch.setattr(recipe, "SHARD_TOKENS", 500)
    plan, texts = recipe.Plan(cost=0.6, max_len=64, data=(Path(data),)), tmp_path / "work" / "text"
    for phase in ("reading", "learning"):

        def kill(now: recipe.Progress, phase: str = phase) -> None:
            if now.phase == phase and list(texts.glob("*.npz")):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            recipe.Distillation(teacher, tmp_path / "s", plan, work=tmp_path / "work").run(kill)
    whole = AutoTokenizer.from_pretrained(teacher).encode(Path(data).read_text())
    assert 0 <= len(whole) - sum(len(Shard.load(path).tokens) for path in texts.glob("*.npz")) < 5


def test_what_cannot_be_meant_is_refused(teacher: str, tmp_path: Path, data: str) -> None:
    """Guards hours of writing before a mistake is told, a cost that layers overrule, and text that nobody asked for."""
    (tmp_path / "teacher.json").write_text(json.dumps({"model": "other"}))
    for size in ((), ("--layers", "0-1", "--cost", "0.5"), ("--start", str(tmp_path), "--cost", "0.1")):
        assert "give one of cost" in distill(teacher, tmp_path / "s", size=size, code=1)
    assert "is the work of 'other'" in distill(teacher, tmp_path / "s", "--work", str(tmp_path), code=1)
    assert "takes 1024 tokens: lower it" in distill(teacher, tmp_path / "s", "--max-len", "2000", code=1)
    assert "they go from 0 to" in distill(teacher, tmp_path / "s", size=("--layers", "0-40"), code=1)
    shutil.copytree(teacher, tmp_path / "gpt2", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    GPT2Config(vocab_size=small.VOCAB).save_pretrained(tmp_path / "gpt2")
    assert "not of gpt2" in distill(str(tmp_path / "gpt2"), tmp_path / "s", code=1)
    assert "none of the files" in distill(teacher, tmp_path / "s", size=("--start", str(tmp_path / "gpt2")), code=1)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "00000.npz").touch()
    about = {"model": teacher, "vocab_size": small.VOCAB, "form": recipe.FORM, "text": "that the teacher wrote itself"}
    (tmp_path / "teacher.json").write_text(json.dumps(about))
    assert "wrote itself, or" in distill(teacher, tmp_path / "s", "--work", str(tmp_path), "--data", data, code=1)
