"""Texts, students cut out of a teacher, the loss and the loop of distillation."""

from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from cascade.engine.model import Model
from cascade.errors import ConfigError
from cascade.training.distillation import Run, Schedule, distil, epochs, top_cross_entropy
from cascade.training.student import Shape, cut, spread, weights_read
from cascade.training.text import HELD_OUT, Shard, Text, batches, padded, score
from cascade.training.writing import TEMPERATURES, Turns, given_prompts, own_prompts, write
from tests import small

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
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


def teacher() -> LlamaForCausalLM:
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
    return score(Model(teacher(), num_threads=1), shard())


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
    model = teacher()
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
    student = cut(teacher(), Shape(32, 64, (0, 3), len(ids)), torch.randint(3, CONFIG.vocab_size, (4, 32)))
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
    model = teacher()
    prompts = [[1, 7, 30 + n, *range(40, 40 + n % 5)] for n in range(30)]
    beginnings = islice(given_prompts(prompts), len(prompts))
    answers = list(write(Model(teacher(), num_threads=1), TURNS, beginnings, rows=4, max_len=24))
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
    for turns, rows, max_len in ((TURNS, 8, 200), (NO_TURNS, 4, 32)):
        texts = [*islice(write(Model(teacher(), num_threads=1), turns, own_prompts(turns), rows=rows, max_len=max_len), 4)]
        assert len({tuple(text.tokens) for text in texts}) == 4
        for text in texts:
            assert tuple(text.tokens[: len(turns.opening)]) == turns.opening
            assert (*text.tokens[text.prompt_len - len(turns.answering) : text.prompt_len],) == turns.answering
            assert text.prompt_len < len(text.tokens)
            assert turns.answering or text.prompt_len == 1
            assert len(text.tokens) <= max_len


def test_passes_that_write_say_what_a_pass_over_the_whole_text_says() -> None:
    """Guards what is learnt: the teacher's likeliest tokens of a position that are those of another one, text or row."""
    model, prompts = Model(teacher(), num_threads=1), [[1, 7, *range(30, 30 + n)] for n in range(1, 20)]
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
        student, expected = cut(teacher(), shape, IDS)(IDS).logits, teacher()(IDS).logits
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
