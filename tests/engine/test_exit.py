"""Models that draft for themselves with some of their layers: what a Transformers model that has no others would say."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from cascade import Cascade, SamplingParams
from cascade.engine.heads.exit import Exit
from cascade.engine.heads.reader import decoder
from cascade.engine.heads.selection import candidates, select
from cascade.engine.model import Model
from cascade.engine.sampling import own_tokens
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ModelError
from cascade.params import Speculation
from cascade.scorer import BLOCK, Row
from tests import small
from tests.architectures import CONTEXT, VOCAB, build, each
from tests.engine.test_heads import GREEDY, LAYERS, WARM, WAYS, Session, attention, deep

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = 2  # layers of an early exit


@dataclass
class FirstLayers:
    """Guesses of a network whose other layers do nothing, computed anew for each."""

    network: PreTrainedModel
    made: ClassVar[Any] = SimpleNamespace(kind="exit", most=99)

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


@dataclass
class WithoutLayers:
    """The same of a network that has read the text with all layers, and goes on without some: over Transformers' cache."""

    network: PreTrainedModel
    skipped: frozenset[int]
    made: ClassVar[Any] = SimpleNamespace(kind="exit", most=99)

    @torch.no_grad()
    def guesses(self, text: Sequence[int], number: int, params: SamplingParams) -> list[int]:
        owner, layers = decoder(self.network)
        held, text = DynamicCache(config=self.network.config), list(text)  # given by place: its name depends on Transformers
        self.network(torch.tensor([text[:-1]]), None, None, held)
        name = next(name for name, module in owner.named_children() if module is layers)
        setattr(owner, name, nn.ModuleList(layer for at, layer in enumerate(layers) if at not in self.skipped))
        for _ in range(number):
            ids, where = torch.tensor([text[-1:]]), torch.tensor([[len(text) - 1]])
            logits = self.network(ids, None, where, held).logits[0, -1:]
            text.append(int(own_tokens(logits, [(params, len(text), 1)])[0]))
        setattr(owner, name, layers)
        return text[len(text) - number :]


def plain(name: str) -> PreTrainedModel:
    network = deep(name)
    network.set_attn_implementation("eager")
    return network


@cache
def served(way: str, name: str = "llama", skipped: frozenset[int] = frozenset(range(FIRST, LAYERS))) -> tuple[Model, Any]:
    """A model that drafts for itself, and what it is to say."""
    network = deep(name)
    model = Model(network, attention=attention(way), cache_tokens=4096, num_threads=1, head=Exit(network))
    exit_of(model).skip(skipped)
    first = skipped == frozenset(range(FIRST, LAYERS))
    return model, FirstLayers(plain(name)) if first else WithoutLayers(plain(name), skipped)


def exit_of(model: Model) -> Exit:
    assert model.reader is not None
    assert isinstance(model.reader.head, Exit)
    return model.reader.head


MIDDLE = frozenset({1, 3})
CASES = [*((way, frozenset(range(FIRST, LAYERS))) for way in WAYS), ("native", MIDDLE), ("contiguous", MIDDLE)]


@pytest.mark.parametrize(("way", "skipped"), CASES)
def test_guesses_are_those_of_the_layers_under_any_schedule(way: str, skipped: frozenset[int]) -> None:
    """Guards keys and values of guesses, which lie among the model's: chunks, wrong drafts, trees, rollbacks and companions
    change no guess, and guesses change no text."""
    model, reference = served(way, skipped=skipped)
    for seed in range(2):
        rng = random.Random(seed)
        texts = [[rng.randrange(VOCAB) for _ in range(size)] for size in (2, 9, 20)]
        sessions = [
            Session(model, reference, params, rng, text) for params, text in zip((GREEDY, WARM, GREEDY), texts, strict=True)
        ]
        for _ in range(9):
            chosen = rng.sample(sessions, rng.randint(1, 3))
            for session, scored in zip(chosen, model.run([session.next() for session in chosen]), strict=True):
                session.check(scored)
        for session in sessions:
            session.store.free()


@pytest.mark.parametrize("name", each())
def test_every_architecture_drafts_for_itself(name: str) -> None:
    """Guards models whose layers are told apart by what they are, return more than hidden states, or lie elsewhere."""
    if name == "longcat_flash":  # whose layers are two in one
        with pytest.raises(ModelError, match="The drafter 'exit' cannot be used: the layers of LongcatFlashForCausalLM"):
            served("native", name)
        return
    model, reference = served("native", name)
    text, store = [(37 * place + 11) % VOCAB for place in range(30)], model.new_cache()
    for params in (GREEDY, WARM):
        [scored] = model.run([Row(store, 0, text, 1, params, guesses=4)])
        assert list(scored.draft.trunk.tokens) == reference.guesses([*text, *scored.own], 4, params)
    store.free()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_guesses_are_those_of_transformers(name: str) -> None:
    """Guards the meaning of "layers": what `generate` drafts with `assistant_early_exit`, which shortens the model so."""
    model, _ = served("native", name)
    network = deep(name)
    text, store = [(23 * place + 5) % VOCAB for place in range(19)], model.new_cache()
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=5)])
    network.config.num_hidden_layers = FIRST
    said = network.generate(torch.tensor([[*text, *scored.own]]), max_new_tokens=5, do_sample=False)[0, len(text) + 1 :]
    assert list(scored.draft.trunk.tokens) == said.tolist()
    store.free()


@pytest.mark.parametrize("way", WAYS)
def test_prefixes_and_branches_of_others_are_guessed_behind(way: str) -> None:
    """Guards what is shared: guesses after a prefix that another session holds leave that one as it was, and a branch that was
    joined is text like any other."""
    model, reference = served(way)
    text = [(13 * place + 5) % VOCAB for place in range(3 * BLOCK)]
    one = model.new_cache()
    [first] = model.run([Row(one, 0, text, 1, GREEDY, guesses=4)])
    taker = model.new_cache()
    taker.reserve(4 * BLOCK)
    taker.reuse(one, 2 * BLOCK)
    end = [text[2 * BLOCK], 7, 9]
    [scored] = model.run([Row(taker, 2 * BLOCK, end, 1, GREEDY, guesses=4)])
    whole = [*text[: 2 * BLOCK], *end, *scored.own]
    assert list(scored.draft.trunk.tokens) == reference.guesses(whole, 4, GREEDY)
    fork = one.fork(len(text))
    [beside] = model.run([Row(fork, len(text), [50], 1, GREEDY)])
    [again] = model.run([Row(one, len(text) - 1, text[-1:], 1, GREEDY, guesses=4)])
    assert (again.own, again.draft) == (first.own, first.draft)
    one.join(fork)
    [joined] = model.run([Row(one, len(text) + 1, beside.own, 1, GREEDY, guesses=3)])
    assert list(joined.draft.trunk.tokens) == reference.guesses([*text, 50, *beside.own, *joined.own], 3, GREEDY)
    for store in (one, taker):
        store.free()


@pytest.mark.parametrize("way", WAYS)
def test_full_stores_are_not_written_behind(way: str) -> None:
    """Guards memory: guesses at the end of a store take a fork for a moment, or there are fewer of them."""
    network = deep("llama")
    model = Model(network, attention=attention(way), cache_tokens=CONTEXT, num_threads=1, head=Exit(network))
    exit_of(model).skip(range(FIRST, LAYERS))
    store = model.new_cache()
    text = [(31 * place + 2) % VOCAB for place in range(CONTEXT - 1)]
    store.reserve(len(text))
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=6)])
    number = len(scored.draft.trunk)
    assert number <= 6
    assert list(scored.draft.trunk.tokens) == served(way)[1].guesses([*text, *scored.own], number, GREEDY)
    store.free()


def test_own_tokens_are_those_without_it() -> None:
    """Guards the text: the bits of logits do not know of guesses, not even where those were written after it."""
    model, _ = served("native")
    alone = Model(deep("llama"), num_threads=1)
    stores = model.new_cache(), alone.new_cache()
    for start, text, own in [(0, range(3, 40), 1), (37, range(5, 12), 4), (20, range(9, 13), 2)]:
        rows = [Row(store, start, list(text), own, WARM, guesses=3, runner_ups=1) for store in stores]
        assert torch.equal(model.logits(rows[:1]), alone.logits(rows[1:]))
        [found], [expected] = model.run(rows[:1]), alone.run(rows[1:])
        assert (found.own, found.runner_ups) == (expected.own, expected.runner_ups)


def test_sixteen_bits() -> None:
    """Guards other dtypes: a pass of few rows is filled up there."""
    network = deep("llama").to(torch.bfloat16)
    model = Model(network, num_threads=1, head=Exit(network))
    exit_of(model).skip(range(FIRST, LAYERS))
    [scored] = model.run([Row(model.new_cache(), 0, [4, 5, 6], 1, WARM, guesses=3)])
    assert len(scored.draft.trunk) == 3


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_are_accepted_by_sessions(temperature: float) -> None:
    """Guards the way of guesses into the next pass: layers that suffice save passes, at any temperature; texts are the same."""
    tokenizer = Tokenizer.from_pretrained(small.paths()[-1])
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)

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
