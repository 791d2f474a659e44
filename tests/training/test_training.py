"""Texts, students cut out of a teacher, the loss and the loop of distillation, and `cascade distill` as a whole."""

import json
import shutil
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from cascade.cli.main import main
from cascade.engine.draft_vocab import FILE
from cascade.engine.model import Model
from cascade.errors import ConfigError
from cascade.training import recipe
from cascade.training.distillation import Run, Schedule, distil, epochs, top_cross_entropy
from cascade.training.student import Shape, cut, spread, weights_read
from cascade.training.text import HELD_OUT, Shard, Text, batches, padded, score
from cascade.training.writing import TEMPERATURES, Turns, given_prompts, own_prompts, write
from tests import small

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = LlamaConfig(**TOKENS, **HEADS, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for name, weight in model.named_parameters():
        if name == "model.norm.weight":
            torch.nn.init.uniform_(weight, 1.45, 1.55)  # tied embeddings fold it in row by row: see `cut`
        elif "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
        elif "embed" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.state_dict()


def random_teacher() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict()))
    model.load_state_dict(_weights())
    return model.eval()


TURNS = Turns(opening=(1, 7), answering=(2, 9, 9), ends=frozenset({2}))
NO_TURNS = Turns((1,), (), frozenset({2}))


def shard(texts: int = 2 * HELD_OUT, length: int = 24) -> Shard:
    tokens = torch.randint(3, CONFIG.vocab_size, (texts, length), generator=torch.Generator().manual_seed(1))
    return Shard.of(
        [Text(row[: length - n % 7].tolist(), 4, TEMPERATURES[n % 3], n % HELD_OUT == 0) for n, row in enumerate(tokens)]
    )


@pytest.fixture(scope="module")
def scored() -> Shard:
    return score(Model(random_teacher(), num_threads=1), shard())


def test_loss_and_gradients_are_those_of_the_plain_formula() -> None:
    """Guards gradients that are computed part by part in bfloat16: equal to the formula up to that."""
    torch.manual_seed(0)
    states, weight = torch.randn(1300, 32, requires_grad=True), torch.randn(257, 32, requires_grad=True)
    ids = torch.stack([torch.randperm(257)[:8] for _ in range(1300)])
    wanted = torch.rand(1300, 8).softmax(-1) * 0.9
    gradients = torch.autograd.grad(top_cross_entropy(states, weight, ids, wanted), (states, weight))
    plain = -(wanted * (states @ weight.T).log_softmax(-1).gather(1, ids)).sum(-1).mean()
    for gradient, expected in zip(gradients, torch.autograd.grad(plain, (states, weight)), strict=True):
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.999


def test_scores_are_the_teachers_whatever_shares_a_batch(scored: Shard) -> None:
    """Guards short texts against what fills their rows up."""
    model = random_teacher()
    for text in (0, 5, 13):
        span = scored.span(text)
        with torch.inference_mode():
            logits = model(torch.from_numpy(scored.tokens[span].astype(np.int64))[None]).logits[0]
        top = logits.log_softmax(-1).topk(4, -1)
        assert (scored.ids[span][:, :1] == top.indices[:, :1].numpy()).mean() > 0.95
        assert np.allclose(scored.logprobs[span][:, :4], top.values.numpy(), atol=0.02)


def test_shards_come_back_from_disk_as_they_were(tmp_path: Path, scored: Shard) -> None:
    """Guards hours of writing: a field that is not saved, or a part of a file that a kill leaves."""
    scored.save(tmp_path / "0.npz")
    read = Shard.load(tmp_path / "0.npz")
    assert all(np.array_equal(getattr(read, name), getattr(scored, name)) for name in Shard.__slots__)
    assert [path.name for path in tmp_path.iterdir()] == ["0.npz"]


def test_an_epoch_has_every_text_once_but_those_held_out() -> None:
    """Guards the judge: a text that it judges by was learnt from; and memory: a batch takes no more than it may."""
    texts = shard()
    kept = texts.numbers(held_out=False)
    batches_of_one = len(list(batches(texts, kept, 128)))
    rows = [rows for _, rows in islice(epochs([texts], 128, seed=0), batches_of_one)]
    assert sorted(text for some in rows for text in some) == kept
    assert sorted([*kept, *texts.numbers(held_out=True)]) == [*range(texts.num_texts)]
    assert all(padded(texts, some).numel() <= 128 for some in rows)


def begin(ids: torch.Tensor) -> Run:
    student = cut(random_teacher(), Shape(32, 64, (0, 3), len(ids)), torch.randint(3, CONFIG.vocab_size, (4, 32)))
    return Run(student.train(), ids, Schedule(tokens=256, warmup_steps=1))


def test_student_learns_and_goes_on_where_it_was(tmp_path: Path, scored: Shard) -> None:
    """Guards runs against learning nothing, and against a checkpoint that lacks a number."""
    run, texts = begin(torch.arange(CONFIG.vocab_size)), scored.numbers(held_out=False)
    before = begin(torch.arange(CONFIG.vocab_size)).learn(scored, texts, 2, 0.0)

    def tell(now: Run) -> None:
        now.seconds = float(now.step)  # as many steps on a busy machine

    distil(run, [scored], 2, 12.0, tmp_path / "c.pt", tell=tell)
    resumed = begin(torch.arange(CONFIG.vocab_size))
    resumed.resume(tmp_path / "c.pt")
    assert (resumed.step, resumed.tokens, resumed.seconds) == (run.step, run.tokens, run.seconds)
    for weight, expected in zip(resumed.student.parameters(), run.student.parameters(), strict=True):
        assert torch.equal(weight, expected)
    assert set(run.agreement([scored], 2)) == {0.0, 1.0}  # of the texts that are held out
    assert run.learn(scored, texts, 2, 0.0) < before


def test_a_part_of_the_tokens_is_learnt_as_the_formula_says(scored: Shard) -> None:
    """Guards the places of tokens in a draft vocabulary: what is not said has no part in the loss, and never agrees."""
    ids, rows, span = torch.arange(1, CONFIG.vocab_size, 2), [1], scored.span(1)
    run = begin(ids)
    with torch.no_grad():
        logits = run.student(padded(scored, rows)).logits[0].float()[:, ids].log_softmax(-1)
    likeliest = torch.from_numpy(scored.ids[span].astype(np.int64))
    wanted = torch.from_numpy(scored.logprobs[span]).float().softmax(-1)
    expected = -(wanted * (likeliest % 2) * logits.gather(1, likeliest // 2)).sum(-1)[1:].mean()
    assert run.learn(scored, rows, 2, 0.0) == pytest.approx(float(expected), rel=0.02)


def test_writing_is_what_the_model_would_say() -> None:
    """Guards rows against each other: answers at temperature 0 are greedy text, whichever share a batch and begin when."""
    model = random_teacher()
    prompts = [[1, 7, 30 + n, *range(40, 40 + n % 5)] for n in range(30)]
    beginnings = islice(given_prompts(prompts), len(prompts))
    answers = list(write(Model(random_teacher(), num_threads=1), TURNS, beginnings, rows=4, max_len=24))
    greedy = [text for text in answers if text.temperature == 0.0]
    assert len(greedy) == 10
    for text in greedy:
        ids = torch.tensor([text.tokens])
        with torch.inference_mode():
            own = model(ids).logits[0].argmax(-1)
        same = (own[text.prompt_len - 1 : -1] == ids[0, text.prompt_len :]).float().mean()
        assert same > 0.9  # ties of random weights aside


def test_conversations_follow_the_template() -> None:
    """Guards turns: a student that has learnt from other ones than it will meet. Without turns a whole text is an answer."""
    model = Model(random_teacher(), num_threads=1)
    for turns, rows, max_len in ((TURNS, 8, 200), (NO_TURNS, 4, 32)):
        texts = [*islice(write(model, turns, own_prompts(turns), rows=rows, max_len=max_len), 4)]
        assert len({tuple(text.tokens) for text in texts}) == 4
        for text in texts:
            assert tuple(text.tokens[: len(turns.opening)]) == turns.opening
            assert (*text.tokens[text.prompt_len - len(turns.answering) : text.prompt_len],) == turns.answering
            assert text.prompt_len < len(text.tokens)
            assert turns.answering or text.prompt_len == 1
            assert len(text.tokens) <= max_len


def test_passes_that_write_say_what_a_pass_over_the_whole_text_says() -> None:
    """Guards what is learnt: the teacher's likeliest tokens of a position that are those of another one, text or row."""
    model, prompts = Model(random_teacher(), num_threads=1), [[1, 7, *range(30, 30 + n)] for n in range(1, 20)]
    cases = ((TURNS, own_prompts(TURNS)), (TURNS, given_prompts(prompts)), (NO_TURNS, own_prompts(NO_TURNS)))
    for turns, beginnings in cases:
        shard = Shard.of([*islice(write(model, turns, beginnings, rows=12, max_len=40, score=True), 12)])
        again = score(model, shard)
        assert len(shard.ids) == len(shard.tokens)
        assert np.array_equal(shard.ids, again.ids)
        assert np.array_equal(shard.logprobs, again.logprobs)


def test_given_prompts_come_at_every_temperature_and_judge_or_teach() -> None:
    """Guards the judge against prompts that were learnt from, and hours against greedy answers that are there already."""
    texts = [*islice(given_prompts([[1], [2], [3]], skip=5), 40)]
    asked = [(text.tokens[0], text.temperature) for text in texts]
    assert {*asked} == {(prompt, temperature) for prompt in (1, 2, 3) for temperature in TEMPERATURES}
    assert all(asked.count((prompt, 0.0)) == 1 for prompt in (1, 2, 3))
    assert all(text.held_out == (text.tokens == [1]) for text in texts)


# students cut out of a teacher

IDS = torch.randint(0, CONFIG.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
WHOLE = Shape(CONFIG.hidden_size, CONFIG.intermediate_size, tuple(range(CONFIG.num_hidden_layers)), CONFIG.vocab_size)


def likeness(shape: Shape) -> float:
    with torch.inference_mode():
        student, expected = cut(random_teacher(), shape, IDS)(IDS).logits, random_teacher()(IDS).logits
        return float(torch.nn.functional.cosine_similarity(student, expected, dim=-1).mean())


def test_uncut_student_says_what_its_teacher_says() -> None:
    """Guards the cut: rotation and folded norms keep the function, but for the scale of single rows before the first norm."""
    narrow = Shape(CONFIG.hidden_size // 4, CONFIG.intermediate_size, WHOLE.layers, CONFIG.vocab_size)
    assert likeness(WHOLE) > max(0.9, likeness(narrow))


@pytest.mark.parametrize("share", [0.2, 0.33, 0.5, 0.9])
def test_a_pass_costs_no_more_than_asked_for(share: float) -> None:
    """Guards the shape: a student dearer than was asked for, or one that Transformers does not load."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, head_dim=64
    )
    shape = Shape.costing(config, share)
    assert 0.6 * share < weights_read(config, shape) / weights_read(config, Shape.whole(config)) <= share
    assert shape.hidden_size % config.num_attention_heads == 0  # or Transformers refuses the result
    assert list(shape.layers) == sorted({*shape.layers})


def test_what_cannot_be_cut_is_refused() -> None:
    """Guards the start of hours of training: a cost that no student has, and an architecture that cannot be cut."""
    with pytest.raises(ConfigError, match=r"cost is 1e-05"):
        Shape.costing(CONFIG, 1e-5)
    with pytest.raises(ConfigError, match="gpt2"):
        Shape.costing(GPT2Config(), 0.1)


def test_kept_layers_are_different_ones() -> None:
    """Guards students of few layers: one that was kept twice, or no first one."""
    for kept in range(1, 31):
        layers = spread(30, kept)
        assert len({*layers}) == kept
        assert layers[0] == 0
        assert kept == 1 or layers[-1] == 29


def test_turns_of_a_chat_template() -> None:
    """Guards the text that is learnt: what stands around the user's words is exactly what the template says."""
    tokenizer = AutoTokenizer.from_pretrained(small.paths()[-1])
    tokenizer.chat_template = CHAT
    turns = Turns.of(tokenizer, [0])
    assert tokenizer.decode([*turns.opening, *turns.answering]) == "<|user|>\n<|assistant|>"
    for without in (None, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        tokenizer.chat_template = without
        assert Turns.of(tokenizer, [0]).answering == ()


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
