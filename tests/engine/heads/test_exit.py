"""Models that draft for themselves with some of their layers: what a Transformers model that has no others would say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cascade import Cascade, SamplingParams
from cascade.engine.heads.exit import Exit, candidates, select
from cascade.engine.heads.reader import decoder
from cascade.engine.model import Model
from cascade.engine.sampling.own_tokens import own_tokens
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ModelError
from cascade.params import Speculation
from cascade.scorer import Row
from tests import small
from tests.architectures import VOCAB, build, each
from tests.engine.heads.test_heads import GREEDY, LAYERS, WARM, deep

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = 2  # layers of an early exit


@dataclass
class FirstLayers:
    """Guesses of a network whose other layers do nothing, computed anew for each."""

    network: PreTrainedModel

    def __post_init__(self) -> None:
        for layer in decoder(self.network)[1][FIRST:]:
            layer.register_forward_hook(nothing_done, with_kwargs=True)

    @torch.no_grad()
    def guesses(self, text: Sequence[int], number: int, params: SamplingParams) -> list[int]:
        text = list(text)
        for _ in range(number):
            logits = self.network(torch.tensor([text]), use_cache=False).logits[0, -1:]
            text.append(int(own_tokens(logits, [(params, len(text), 1)])[0]))
        return text[len(text) - number :]


def nothing_done(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
    hidden = given[0] if given else named["hidden_states"]
    return (hidden, *out[1:]) if isinstance(out, tuple) else hidden


def plain(name: str) -> PreTrainedModel:
    network = deep(name)
    network.set_attn_implementation("eager")
    return network


def served(name: str = "llama") -> tuple[Model, FirstLayers]:
    """A model that drafts for itself with its first layers, and what it is to say."""
    network = deep(name)
    model = Model(network, cache_tokens=4096, num_threads=1, head=Exit(network))
    exit_of(model).skip(range(FIRST, LAYERS))
    return model, FirstLayers(plain(name))


def exit_of(model: Model) -> Exit:
    assert model.reader is not None
    assert isinstance(model.reader.head, Exit)
    return model.reader.head


@pytest.mark.parametrize("name", each())
def test_every_architecture_drafts_for_itself(name: str) -> None:
    """Guards models whose layers are told apart by what they are, return more than hidden states, or lie elsewhere."""
    if name == "longcat_flash":  # whose layers are two in one
        with pytest.raises(ModelError, match="The drafter 'exit' cannot be used: the layers of LongcatFlashForCausalLM"):
            served(name)
        return
    model, reference = served(name)
    text, store = [(37 * place + 11) % VOCAB for place in range(30)], model.new_cache()
    for params in (GREEDY, WARM):
        [scored] = model.run([Row(store, 0, text, 1, params, guesses=4)])
        assert list(scored.draft.trunk.tokens) == reference.guesses([*text, *scored.own], 4, params)
    store.free()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_guesses_are_those_of_transformers(name: str) -> None:
    """Guards the meaning of "layers": what `generate` drafts with `assistant_early_exit`, which shortens the model so."""
    model, _ = served(name)
    network = deep(name)
    text, store = [(23 * place + 5) % VOCAB for place in range(19)], model.new_cache()
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=5)])
    network.config.num_hidden_layers = FIRST
    said = network.generate(torch.tensor([[*text, *scored.own]]), max_new_tokens=5, do_sample=False)[0, len(text) + 1 :]
    assert list(scored.draft.trunk.tokens) == said.tolist()
    store.free()


# which layers


def silent(layers: Sequence[int]) -> PreTrainedModel:
    """A model of which some layers do nothing."""
    network = deep("llama")
    with torch.no_grad():
        for layer in layers:
            network.model.layers[layer].self_attn.o_proj.weight.zero_()
            network.model.layers[layer].mlp.down_proj.weight.zero_()
    return network


@pytest.mark.parametrize("useless", [[2, 3, 4, 5], [3, 4, 5], [1, 3]])
def test_layers_that_do_nothing_are_skipped(useless: list[int]) -> None:
    """Guards the choice at load: of layers that are not needed all go that one of the choices has, and guesses are right."""
    model = Model.drafting(silent(useless), None, "exit", num_threads=1)
    assert exit_of(model).skipped == frozenset(useless)
    assert select(model, skip=useless) == 1.0
    assert 0 < model.guess_cost < 1


def test_choices_are_layers_of_the_model() -> None:
    """Guards small models and large ones: something is left, something is skipped."""
    for number in range(2, 81):
        assert candidates(number)
        assert all(0 < len(one) < number and {*one} <= {*range(number)} for one in candidates(number))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": LAYERS}, f"drafter.layers is {LAYERS}, but the model has {LAYERS} layers: name fewer"),
        ({"skip": (1, LAYERS)}, f"drafter.skip names layer {LAYERS}, but those of the model are 0 to {LAYERS - 1}"),
        ({"skip": tuple(range(LAYERS))}, f"drafter.skip names all {LAYERS} layers: leave one"),
    ],
)
def test_layers_that_there_are_not_are_refused(options: dict[str, Any], sentence: str) -> None:
    """Guards configurations of other models."""
    with pytest.raises(ModelError, match=sentence):
        Model.drafting(deep("llama"), None, "exit", num_threads=1, **options)
    with pytest.raises(ModelError, match="those are for 'exit'"):
        Model.drafting(deep("llama"), None, "auto", num_threads=1, **options)


def test_models_of_one_layer_are_refused() -> None:
    """Guards models that cannot be cut."""
    with pytest.raises(ModelError, match="has one layer"):
        Model.drafting(build("llama", num_hidden_layers=1), None, "exit", num_threads=1)


# in a cascade


def test_guesses_are_accepted_by_sessions() -> None:
    """Guards the way of guesses into the next pass: layers that suffice save passes, and texts are the same."""
    tokenizer = Tokenizer.from_pretrained(small.paths()[-1])
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3)

    def made() -> PreTrainedModel:
        network = build("llama", num_hidden_layers=LAYERS, vocab_size=4096)
        with torch.no_grad():
            for layer in network.model.layers[FIRST:]:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        return network

    with Cascade([Model(made(), num_threads=1)], tokenizer, drafter=None) as alone:
        expected = alone.generate([5, 6, 7], params)
    with Cascade([Model.drafting(made(), None, "exit", 2, num_threads=1)], tokenizer, drafter=None) as cascade:
        assert cascade.names == ("exit", "full")
        completion = cascade.generate([5, 6, 7], params, Speculation(tiers=("exit",)))
        passes = cascade.tiers[0].snapshot().passes
    assert completion.token_ids == expected.token_ids
    assert passes <= 30
    [edge] = [edge for edge in completion.stats.edges if edge.drafter]
    assert edge.accepted_by_rank[0] == edge.proposed_by_rank[0] > 0, "all that these layers say is right"
    assert {edge.drafter for edge in completion.stats.edges} == {"", "exit"}
