"""Models that draft for themselves with their first layers: what a model says that has no others."""

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cascade import Cascade, SamplingParams
from cascade.engine.heads.exit import Exit
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ModelError
from cascade.params import Speculation
from cascade.scorer import Row
from tests import small
from tests.architectures import VOCAB, build
from tests.engine.heads.test_heads import GREEDY, LAYERS, WARM, deep

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = 2  # layers of an early exit


def cut_off(size: int = VOCAB) -> PreTrainedModel:
    """A model whose other layers do nothing."""
    network: Any = build("llama", num_hidden_layers=LAYERS, vocab_size=size)
    with torch.no_grad():
        for layer in network.model.layers[FIRST:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return network  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_guesses_are_those_of_transformers(name: str) -> None:
    """Guards the meaning of "layers": what `generate` drafts with `assistant_early_exit`, which shortens the model so."""
    model, network = Model(deep(name), num_threads=1, head=Exit(deep(name), FIRST)), deep(name)
    text, store = [(23 * place + 5) % VOCAB for place in range(19)], model.new_cache()
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=5)])
    network.config.num_hidden_layers = FIRST
    said = network.generate(torch.tensor([[*text, *scored.own]]), max_new_tokens=5, do_sample=False)[0, len(text) + 1 :]
    assert list(scored.draft.trunk.tokens) == said.tolist()


@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_guesses_change_no_store(params: SamplingParams) -> None:
    """Guards keys and values after the text, over which guesses are written: own tokens do not know of them, in any schedule,
    at a store's end, and guesses are right where the other layers do nothing."""
    model, alone = Model(cut_off(), num_threads=1, head=Exit(cut_off(), FIRST)), Model(cut_off(), num_threads=1)
    rng = random.Random(3)
    for size in (2, 15, 30):
        text, stores, held = [rng.randrange(VOCAB) for _ in range(size)], (model.new_cache(), alone.new_cache()), 0
        for guesses in (3, 0, 5, 1):
            rows = [Row(store, held, text[held:], 1, params, guesses=guesses) for store in stores]
            ([found], [expected]) = model.run(rows[:1]), alone.run(rows[1:])
            assert found.own == expected.own
            held, text = len(text), [*text, *found.own]
            right = list(text)
            for _ in found.draft.trunk.tokens:
                [next_] = alone.run([Row(alone.new_cache(), 0, right, 1, params)])
                right += next_.own
            assert list(found.draft.trunk.tokens) == right[len(text) :]


@pytest.mark.parametrize(
    ("name", "kind", "layers", "sentence"),
    [
        ("llama", "exit", LAYERS, f"drafter.layers is {LAYERS}, but the model has {LAYERS} layers: name fewer"),
        ("llama", "exit", None, "'exit' needs layers"),
        ("llama", "auto", 2, "'exit' needs layers, others do not"),
        ("gemma2", "exit", 2, "is for models of the Llama family on CPUs, not for Gemma2ForCausalLM on cpu"),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, kind: str, layers: int | None, sentence: str) -> None:
    """Guards configurations of other models."""
    with pytest.raises(ModelError, match=sentence):
        Model.drafting(deep(name), None, kind, layers, num_threads=1)


def test_guesses_are_accepted_by_sessions() -> None:
    """Guards the way of guesses into the next pass, for a drafter that keeps nothing: all that these layers say is right."""
    params, tokenizer = SamplingParams(max_tokens=20, temperature=0.8, seed=3), Tokenizer.from_pretrained(small.paths()[-1])
    with Cascade([Model.drafting(cut_off(4096), None, "exit", FIRST, num_threads=1)], tokenizer, drafter=None) as cascade:
        completion = cascade.generate([5, 6, 7], params, Speculation(tiers=("exit",)))
        alone = cascade.generate([5, 6, 7], params, Speculation("off"))
    assert completion.token_ids == alone.token_ids
    [edge] = [edge for edge in completion.stats.edges if edge.drafter]
    assert edge.drafter == "exit"
    assert edge.accepted_by_rank[0] == edge.proposed_by_rank[0] > 0
