"""Texts, the loss and the loop of distillation."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from cascade.engine.model import Model
from cascade.training.distillation import Run, Schedule, distil, epochs, top_cross_entropy
from cascade.training.student import Shape, cut
from cascade.training.text import HELD_OUT, Shard, batches, held_out, padded, score
from cascade.training.writing import Turns, Written, given_prompts, own_prompts, write
from tests.training.teacher import CONFIG, teacher

TURNS = Turns(opening=(1, 7), answering=(2, 9, 9), ends=frozenset({2}))


def shard(texts: int = 2 * HELD_OUT, length: int = 24) -> Shard:
    tokens = torch.randint(3, CONFIG.vocab_size, (texts, length), generator=torch.Generator().manual_seed(1))
    return Shard.of([Written(row[: length - n % 7].tolist(), 4, (0.0, 0.7, 1.0)[n % 3]) for n, row in enumerate(tokens)])


@pytest.fixture(scope="module")
def scored() -> Shard:
    return score(teacher(), shard())


def test_loss_and_gradients_are_those_of_the_plain_formula() -> None:
    """Guards gradients that are computed part by part in bfloat16: equal to the formula up to that."""
    torch.manual_seed(0)
    states, weight = torch.randn(1300, 32, requires_grad=True), torch.randn(257, 32, requires_grad=True)
    ids = torch.stack([torch.randperm(257)[:8] for _ in range(1300)])
    wanted = torch.rand(1300, 8).softmax(-1) * 0.9
    found = torch.autograd.grad(top_cross_entropy(states, weight, ids, wanted), (states, weight))
    plain = -(wanted * (states @ weight.T).log_softmax(-1).gather(1, ids)).sum(-1).mean()
    for one, other in zip(found, torch.autograd.grad(plain, (states, weight)), strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.999


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
    one = shard()
    kept = [text for text in range(one.num_texts) if not held_out(text)]
    batches_of_one = len(list(batches(one, kept, 128)))
    rows = [rows for _, rows in islice(epochs([one], 128, seed=0), batches_of_one)]
    assert sorted(text for some in rows for text in some) == kept
    assert all(padded(one, some).numel() <= 128 for some in rows)


def begin(said: torch.Tensor) -> Run:
    """A student in training that says these tokens."""
    student = cut(teacher(), Shape(32, 64, (0, 3), len(said)), torch.randint(3, CONFIG.vocab_size, (4, 32)))
    return Run(student.train(), said, Schedule(tokens=256, warmup_steps=1))


def test_student_learns_and_goes_on_where_it_was(tmp_path: Path, scored: Shard) -> None:
    """Guards runs against learning nothing, and against a checkpoint that lacks a number."""
    run, losses = begin(torch.arange(CONFIG.vocab_size)), list[float]()

    def tell(now: Run) -> None:
        losses.append(now.loss)
        now.seconds = float(now.step)  # as many steps on a busy machine

    distil(run, [scored], 2, 30.0, tmp_path / "c.pt", tell=tell)
    assert run.loss < losses[0]
    resumed = begin(torch.arange(CONFIG.vocab_size))
    resumed.resume(tmp_path / "c.pt")
    assert (resumed.step, resumed.tokens, resumed.seconds, resumed.loss) == (run.step, run.tokens, run.seconds, run.loss)
    for one, other in zip(resumed.student.parameters(), run.student.parameters(), strict=True):
        assert torch.equal(one, other)
    assert {0.0, 0.7} == set(run.agreement([scored], 2))


def test_a_part_of_the_tokens_is_learnt_as_the_formula_says(scored: Shard) -> None:
    """Guards the places of tokens in a draft vocabulary: what is not said has no part in the loss, and never agrees."""
    said, rows, span = torch.arange(1, CONFIG.vocab_size, 2), [1], scored.span(1)
    run = begin(said)
    with torch.no_grad():
        logits = run.student(padded(scored, rows)).logits[0].float()[:, said].log_softmax(-1)
    likeliest = torch.from_numpy(scored.ids[span].astype(np.int64))
    wanted = torch.from_numpy(scored.logprobs[span]).float().softmax(-1)
    expected = -(wanted * (likeliest % 2) * logits.gather(1, likeliest // 2)).sum(-1)[1:].mean()
    assert run.learn(scored, rows, 2, 0.0) == pytest.approx(float(expected), rel=0.02)


def test_writing_is_what_the_model_would_say() -> None:
    """Guards rows against each other: answers at temperature 0 are greedy text, whichever share a batch and begin when."""
    model = teacher()
    prompts = [[1, 7, 30 + n, *range(40, 40 + n % 5)] for n in range(30)]
    answers = list(write(Model(teacher(), num_threads=1), TURNS, given_prompts(iter(prompts)), rows=4, max_len=24))
    greedy = [text for text in answers if text.temperature == 0.0]
    assert len(greedy) == 10
    for text in greedy:
        ids = torch.tensor([text.tokens])
        with torch.inference_mode():
            own = model(ids).logits[0].argmax(-1)
        same = (own[text.prompt_len - 1 : -1] == ids[0, text.prompt_len :]).float().mean()
        assert same > 0.9  # ties of random weights aside


def test_conversations_follow_the_template() -> None:
    """Guards turns: a student that has learnt from other ones than it will meet."""
    texts = list(islice(write(Model(teacher(), num_threads=1), TURNS, own_prompts(TURNS), rows=8, max_len=200), 4))
    for text in texts:
        assert tuple(text.tokens[:2]) == TURNS.opening
        assert tuple(text.tokens[text.prompt_len - 3 : text.prompt_len]) == TURNS.answering
        assert text.answered
        assert len(text.tokens) <= 200


def test_base_models_write_on_from_their_start_token() -> None:
    """Guards models without turns, whose whole text is an answer."""
    turns = Turns((1,), (), frozenset({2}))
    texts: Iterator[Written] = write(Model(teacher(), num_threads=1), turns, own_prompts(turns), rows=4, max_len=32)
    assert all(text.tokens[0] == 1 and text.prompt_len == 1 for text in islice(texts, 6))
