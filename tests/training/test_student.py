"""Students cut out of a teacher."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from cascade.errors import ConfigError
from cascade.training.recipe import Plan
from cascade.training.student import Shape, cost, cut, spread
from cascade.training.writing import Turns
from tests import small
from tests.training.teacher import CHAT, CONFIG, teacher

IDS = torch.randint(0, CONFIG.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))


def whole() -> Shape:
    return Shape(CONFIG.hidden_size, CONFIG.intermediate_size, tuple(range(CONFIG.num_hidden_layers)), CONFIG.vocab_size)


def likeness(shape: Shape) -> float:
    """Mean cosine of the student's and the teacher's logits."""
    with torch.inference_mode():
        student, said = cut(teacher(), shape, IDS)(IDS).logits, teacher()(IDS).logits
        return float(torch.nn.functional.cosine_similarity(student, said, dim=-1).mean())


def test_uncut_student_says_what_its_teacher_says() -> None:
    """Guards the cut: rotation and folded norms keep the function, but for the scale of single rows before the first norm."""
    narrow = Shape(CONFIG.hidden_size // 4, CONFIG.intermediate_size, whole().layers, CONFIG.vocab_size)
    assert likeness(whole()) > max(0.9, likeness(narrow))


@pytest.mark.parametrize("share", [0.2, 0.33, 0.5, 0.9])
def test_a_pass_costs_no_more_than_asked_for(share: float) -> None:
    """Guards the shape: a student dearer than was asked for, or one that Transformers does not load."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, head_dim=64
    )
    shape = Shape.costing(config, share)
    assert 0.6 * share < cost(config, shape) <= share
    assert shape.hidden_size % config.num_attention_heads == 0  # or Transformers refuses the result
    assert list(shape.layers) == sorted({*shape.layers})


def test_what_cannot_be_cut_is_refused() -> None:
    """Guards the start of hours of training: a cost that no student has, and an architecture that cannot be cut."""
    with pytest.raises(ConfigError, match=r"cost is 1e-05"):
        Shape.costing(CONFIG, 1e-5)
    with pytest.raises(ConfigError, match="cost is -1"):
        Plan(-1.0)
    other = teacher()
    other.config.model_type = "gpt2"
    with pytest.raises(ConfigError, match="gpt2"):
        cut(other, whole(), IDS)


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
