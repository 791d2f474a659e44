"""The packed pass on real architectures, against Transformers' own."""

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, sliding_window_causal_mask_function

from cascade import ModelError, SamplingParams
from cascade.cpu.cache import Span
from cascade.cpu.program import Program
from cascade.engine.checkpoint import anatomy, load, load_trainable
from cascade.engine.model import Model
from cascade.engine.network import llama
from cascade.engine.network.attention import Cache, Contiguous, Pass, Survey, attend, window_of_mask
from cascade.engine.network.llama import Llama, is_written_out
from cascade.engine.network.published import Published, agree
from cascade.engine.threads import limited
from cascade.scorer import TILE, Row, Scored
from tests.architectures import CONTEXT, DEFAULT, REFUSED, SERVED, VOCAB, WRITTEN_OUT, build, each
from tests.cases import crossed, rare

GREEDY = SamplingParams(temperature=0.0, seed=0)
PREFIX = tuple(range(3, 33))  # several windows long
LENGTH = 100  # of a text, more than a tile

pytestmark = pytest.mark.usefixtures("one_thread")


def text(number: int, vocab_size: int) -> list[int]:
    return [(7919 * place + 104729 * number + 17) % vocab_size for place in range(LENGTH)]


def whole(model: Model, tokens: list[int]) -> Tensor:
    """Logits of a text that is scored at once, by itself."""
    return model.logits([Row(model.new_cache(), 0, tokens, len(tokens), GREEDY)])


def in_pieces(model: Model, tokens: list[int], rng: random.Random) -> Tensor:
    """The same in random pieces, after wrong drafts that are rolled back, beside other texts."""
    others = [text(number, model.vocab_size) for number in (1, 2, 3)]
    stores, at, store = [model.new_cache() for _ in others], [0] * len(others), model.new_cache()
    parts: list[Tensor] = []
    start = 0
    while start < len(tokens):
        n = min(rng.choice([1, 2, 3, 5, 12, 33]), len(tokens) - start)
        wrong = [rng.randrange(model.vocab_size) for _ in range(rng.randint(0, 5))]
        rows = [Row(store, start, [*tokens[start : start + n], *wrong], n + len(wrong), GREEDY)]
        for number, other in enumerate(others):
            size = min(rng.randint(0, 4), len(other) - at[number])
            if size:
                rows.append(Row(stores[number], at[number], other[at[number] : at[number] + size], size, GREEDY))
                at[number] += size
        parts.append(model.logits(rows)[:n])
        start += n
    return torch.cat(parts)


TEXT = text(0, VOCAB)


@cache
def served(name: str, attention: str = "native") -> Model:
    network = build(name) if attention == "native" else Published(build(name), attention=Contiguous)
    return Model(network, cache_tokens=4096)


NATIVE = {*DEFAULT, *WRITTEN_OUT}
CONTIGUOUS = ("llama", "gemma2", "deepseek_v3")  # by default: it is for 16 bits, and the others have tests of their bits
WAYS = [
    pytest.param(
        name,
        attention,
        id=name if attention == "native" else f"{name}-{attention}",
        marks=() if name in (CONTIGUOUS if attention == "contiguous" else NATIVE) else pytest.mark.slow,
    )
    for name in SERVED
    for attention in ("native", "contiguous")
]


def _logits(model: Model, *rows: tuple[Any, int, Sequence[int]]) -> Tensor:
    return model.logits([Row(store, start, tokens, len(tokens), GREEDY) for store, start, tokens in rows])


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_logits_are_those_of_transformers_under_any_schedule(name: str, attention: str) -> None:
    """Guards exactness: no chunking, wrong draft, rollback or companion in the pass may change what a text is scored with."""
    model, network = served(name, attention), build(name)
    network.set_attn_implementation("eager")
    tokens = TEXT[:56]  # several windows long; with a wrong end still within the context of all
    with torch.inference_mode():
        expected = network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    for seed in range(2):
        logits = in_pieces(model, tokens, random.Random(seed))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_logits_are_of_the_wanted_positions_alone() -> None:
    """Guards the projection to the vocabulary, dear at 150k tokens, and its order."""
    model = Model(build("gemma"))
    everything = _logits(model, (model.new_cache(), 0, PREFIX), (model.new_cache(), 0, PREFIX[:5]))
    rows = [Row(model.new_cache(), 0, PREFIX, 2, GREEDY), Row(model.new_cache(), 0, PREFIX[:5], 3, GREEDY)]
    projected: list[int] = []
    head = model.network.module.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, out: projected.append(out[..., 0].numel()))
    wanted = model.logits(rows)
    assert wanted.shape == (5, VOCAB)
    torch.testing.assert_close(wanted, torch.cat([everything[28:30], everything[-3:]]))
    chunk = Row(model.new_cache(), 0, PREFIX, 0, GREEDY)
    assert model.logits([chunk]).shape == (0, VOCAB)
    assert model.run([chunk]) == [Scored([])]
    assert projected == [5, 0, 0], "128 thousand tokens of a prompt would be 128 GiB of logits"


@pytest.mark.parametrize("name", each(REFUSED, default=("falcon", "mamba", "qwen3_next", "llama4_text", "deepseek_v32")))
def test_refused_architectures_are_named(name: str, tmp_path: Path) -> None:
    """Guards against serving a model whose layers bypass the cache: its text would be nonsense. `cascade check` knows it."""
    network = build(name)
    network.config.save_pretrained(tmp_path)
    for load_it in (lambda: Model(network), lambda: anatomy(str(tmp_path))):
        with pytest.raises(ModelError, match=f"^{type(network).__name__} cannot be served: .+"):
            load_it()


def test_context_ends_where_logits_would_depend_on_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long RoPE (Phi 3): one long text in a pass changes the frequencies of all rows, and of their past."""
    assert served("phi3-longrope").context_len == 64
    assert Model(build("llama-dynamic")).context_len == CONTEXT
    assert served("gpt2").context_len == CONTEXT
    model = Model(build("llama"))
    monkeypatch.setitem(vars(model.network.config), "max_position_embeddings", None)
    assert model.context_len > 10**6


@pytest.mark.parametrize(("name", "dtype"), [("mixtral", torch.bfloat16), ("deepseek_v3", torch.float16)])
def test_rounding_is_no_reason_to_refuse(name: str, dtype: torch.dtype) -> None:
    """Guards against a probe so strict that good models in 16 bits are refused, such as mixtures of experts."""
    assert Model(build(name).to(dtype)).dtype is dtype


class Stray:
    """Our attention with a mistake in it."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
        rows: Pass = options["cascade_pass"]
        if self.mistake == "late":
            options["cascade_pass"] = Pass(
                [Span(s.cache, s.begin, s.end, max(0, s.start - 1)) for s in rows.spans], rows.windows
            )
        elif self.mistake == "mixed":
            options["cascade_pass"] = Pass([Span(Cache(), 0, query.shape[2], 0)], rows.windows)
        elif self.mistake == "scale":
            options["scaling"] = 0.5
        elif self.mistake == "layer" and module.layer_idx == 1:
            return torch.full_like(query.transpose(1, 2), torch.nan), None
        return attend(module, query, key, value, mask, **options)


@pytest.mark.parametrize("mistake", ["late", "mixed", "scale", "layer"])
def test_probe_sees_mistakes(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """Guards the probe, in its coarsest dtype: a network that treats rows wrongly must not be served."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "cascade", Stray(mistake))
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: its logits change"):
        Published(build("llama").to(torch.bfloat16), attention=Contiguous)


def test_probe_sees_that_positions_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards models that number tokens by themselves, as if the packed input were one text."""
    network = build("gemma")
    forward = network.model.forward
    monkeypatch.setattr(network.model, "forward", lambda *args, position_ids=None, **options: forward(*args, **options))
    with pytest.raises(ModelError, match="logits change"):
        Model(network)


@pytest.mark.parametrize(
    ("mask", "size", "window"),
    [
        (causal_mask_function, None, 0),
        (sliding_window_causal_mask_function(8), 8, 8),
        (sliding_window_causal_mask_function(1), 1, 1),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), 8, -1),
        (chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long)), 8192, -1),
        (lambda batch, head, query, keys: keys <= query + 1, None, -1),
        (lambda batch, head, query, keys: (keys <= query) & (keys % 2 == 0), None, -1),
    ],
)
def test_windows_are_read_off_masks(mask: Any, size: int | None, window: int) -> None:
    """Guards the survey: chunked, dilated or two-sided attention must not pass for a window."""
    assert int(window_of_mask(mask_function=mask, local_size=size)) == window


def test_cache_holds_and_frees() -> None:
    """Guards memory: what is counted is what is held, growth keeps what is written, nothing stays when freed."""
    model = Model(build("llama", head_dim=16))
    store = model.new_cache()
    assert store.nbytes == 0
    _logits(model, (store, 0, PREFIX))
    assert model.bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size of a head, bytes
    assert store.nbytes == TILE * model.bytes_per_token
    expected = _logits(model, (store, len(PREFIX), PREFIX))
    store.reserve(TILE + 1)
    assert store.nbytes == 2 * TILE * model.bytes_per_token
    assert torch.equal(_logits(model, (store, len(PREFIX), PREFIX)), expected)
    store.free()
    assert store.nbytes == 0


@pytest.mark.parametrize("attention", ["native", "contiguous"])
def test_drafts_that_overflow_harm_nobody(attention: str) -> None:
    """Guards the text, branches and the next user of the memory against a wrong draft whose keys are not numbers."""
    network = build("llama-untied-bias")
    given = network if attention == "native" else Published(network, attention=Contiguous)
    model = Model(given, cache_tokens=1024)
    text, other = tuple(range(3, 20)), tuple(range(40, 46))
    expected = _logits(model, (model.new_cache(), 0, text)), _logits(model, (model.new_cache(), 0, text[:12] + other))[12:]
    with torch.no_grad():
        network.get_input_embeddings().weight[77] = torch.inf
    store = model.new_cache()
    logits = _logits(model, (store, 0, (*text[:10], *range(30, 40), 77)))
    assert not logits[-1].isfinite().any()
    torch.testing.assert_close(logits[:10], expected[0][:10], rtol=1e-4, atol=1e-4)
    fork, wrong = store.fork(12), store.fork(9)
    logits = _logits(model, (wrong, 9, (77, 5)), (store, 10, text[10:]), (fork, 12, other[:2]))
    torch.testing.assert_close(logits[2:], torch.cat([expected[0][10:], expected[1][:2]]), rtol=1e-4, atol=1e-4)
    _logits(model, (fork, 14, (77, 77)))
    logits = _logits(model, (fork, 14, other[2:]), (store, 16, text[16:]), (wrong, 9, text[9:]))
    torch.testing.assert_close(logits, torch.cat([expected[1][2:], expected[0][16:], expected[0][9:]]), rtol=1e-4, atol=1e-4)
    for held in (fork, wrong, store):
        held.free()
    logits = _logits(model, (model.new_cache(), 0, text))  # in the blocks that the first one had
    torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-4)


def test_probe_takes_keys_as_large_as_published_ones() -> None:
    """Guards Qwen2.5 in bfloat16, which was refused: biases of its keys are in the hundreds."""
    network = build("qwen2")
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, 200)
    Model(network.to(torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 33, 100])
def test_a_size_of_pass_has_one_program(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards speed: passes of more than 32 tokens once made their programs anew each time, for several milliseconds."""
    model, made = Model(build("llama")), list[Program]()

    def program(*given: Any) -> Program:
        made.append(Program(*given))
        return made[-1]

    monkeypatch.setattr(llama, "Program", program)
    for _ in range(3):
        cache = model.new_cache()
        model.run([Row(cache, 0, (7,) * tokens, 1, GREEDY)])
        cache.free()
    assert len(made) <= 1


def test_a_model_may_be_asked_by_several_threads() -> None:
    """Guards tiers that share a model: their threads' passes wrote into the same memory, and texts were not the model's."""
    model = Model(build("llama"), cache_tokens=8192, num_threads=1)
    texts = [[(step + place) % 60 + 3 for place in range(24)] for step in range(4)]

    def passes(text: list[int]) -> list[list[int]]:
        caches = [model.new_cache() for _ in range(40)]
        return [list(model.run([Row(cache, 0, text, len(text), GREEDY)])[0].own) for cache in caches]

    with ThreadPoolExecutor(len(texts)) as workers:
        together = list(workers.map(passes, texts))
    for tokens, results in zip(texts, together, strict=True):
        assert results == [passes(tokens)[0]] * 40


@pytest.mark.parametrize(
    ("name", "dtype"), crossed({name: name for name in WRITTEN_OUT}, {"float32": torch.float32, "bfloat16": torch.bfloat16})
)
def test_own_networks_are_those_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Guards exactness: a checkpoint is read as Transformers reads it, and says the same, beyond its windows."""
    build(name).to(dtype).save_pretrained(tmp_path)
    own, published = load(str(tmp_path), device="cpu"), load_trainable(str(tmp_path), device="cpu")
    assert isinstance(own, Llama)
    assert is_written_out(published), "as Transformers wrote it, it says the same, much later"
    model, other = Model(own, cache_tokens=1024, num_threads=1), Model(published, cache_tokens=1024, num_threads=1)
    with torch.inference_mode():
        expected = published(input_ids=torch.tensor([TEXT[:40], TEXT[60:]]), use_cache=False).logits
    assert agree(published, torch.stack([whole(model, TEXT[:40]), whole(model, TEXT[60:])]), expected)
    assert own.num_parameters == published.num_parameters()
    assert torch.equal(whole(model, TEXT[:60]), whole(other, TEXT[:60]))
    survey = Survey.of(published)
    assert own.config.windows == [*survey.windows.values()]
    assert {own.sizes} == {*survey.heads.values()}


@pytest.mark.parametrize("surplus", ["tied, and the same", "tied, and other", "missing", "old frequencies"])
def test_other_weights_are_read_as_transformers_does(surplus: str, tmp_path: Path) -> None:
    """Guards files that it reads in its own way: an output embedding that differs though it should be tied, names."""
    published = build("llama", tie_word_embeddings=True)
    published.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    if surplus.startswith("tied"):
        weights["lm_head.weight"] = embedding + (surplus == "tied, and other")
    elif surplus == "missing":
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    else:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file({name: weight.clone() for name, weight in weights.items()}, file, metadata={"format": "pt"})
    models = (Model(made(str(tmp_path), device="cpu"), num_threads=1) for made in (load, load_trainable))
    assert torch.equal(*(whole(model, TEXT[:20]) for model in models))


SCALED = {"rope_type": "linear", "factor": 4.0}
CHANGES: list[tuple[str, dict[str, Any], bool]] = [  # of a configuration by hand; whether Transformers takes them
    ("qwen3", {"rope_scaling": SCALED}, True),  # as model cards say
    ("qwen3", {"rope_scaling": SCALED, "rope_theta": 500.0}, True),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 500.0}, True),
    ("llama", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}, True),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, True),
    ("llama", {"hidden_act": "gelu"}, True),
    ("llama", {"quantization_config": {"quant_method": "no such method"}}, True),
    ("llama", {"rope_scaling": {"rope_type": "su", "factor": 2.0}}, False),
    ("llama", {"num_key_value_heads": None}, False),
    ("llama", {"rms_norm_eps": None}, False),
    ("mistral", {"sliding_window": 0}, False),
    ("qwen2", {"layer_types": ["full_attention"]}, False),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, False),
]


@pytest.mark.parametrize(("name", "changes", "taken"), CHANGES, ids=str)
def test_configurations_mean_what_they_mean_to_transformers(
    name: str, changes: dict[str, Any], taken: bool, tmp_path: Path
) -> None:
    """Guards models that change a little of a known one, `rope_scaling` beside `rope_parameters`, windows, and tracebacks."""
    build(name).save_pretrained(tmp_path)
    file, source = tmp_path / "config.json", str(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with nullcontext() if taken else pytest.raises(ModelError), torch.inference_mode():
        logits = whole(Model(load(source, device="cpu"), num_threads=1), TEXT[:40])
        expected = load_trainable(source, device="cpu")(input_ids=torch.tensor([TEXT[:40]]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# On a CPU the bits of a text's logits depend on the text alone, so that near-ties are decided the same way in every pass.


DENSE = [*WRITTEN_OUT, "gemma2", "gemma3_text", "phi", "gpt2", "olmo2", "granite"]

# an expert gets as many rows as the router sends it, and long RoPE depends on companions
PLAIN = [name for name, fields in SERVED.items() if name != "phi3-longrope" and not any("expert" in key for key in fields)]


def cases(dtype: torch.dtype, names: Sequence[str], default: Sequence[str] = DEFAULT) -> list[Any]:
    """Names with a dtype; by default those that are in ``default``."""
    kind = str(dtype).removeprefix("torch.")
    return [pytest.param(*param.values, dtype, id=f"{param.id}, {kind}", marks=param.marks) for param in each(names, default)]


def made(name: str, dtype: torch.dtype) -> Model:
    """In float32 of sizes that are multiples of what the processor takes at once, as real ones are; only with the promise."""
    sizes = {"n_embd": 128} if "n_embd" in SERVED[name] else {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    network = build(name, **sizes) if dtype is torch.float32 else build(name).to(dtype)
    model = Model(network, cache_tokens=4096)
    if not model.same_bits:
        pytest.skip(f"this machine does not promise it: {model.summary}")
    return model


QUICK = ("llama-untied-bias", "qwen2-sliding", "qwen3", "gemma2", "gpt2")


@pytest.mark.parametrize(("name", "dtype"), cases(torch.bfloat16, PLAIN) + cases(torch.float32, DENSE, QUICK))
def test_logits_are_those_of_the_text_alone(name: str, dtype: torch.dtype) -> None:
    """Guards texts in the dtype of real models: rounding that depends on companions makes them part at near-ties."""
    model = made(name, dtype)
    assert torch.equal(in_pieces(model, TEXT, random.Random(name)), whole(model, TEXT))


@pytest.mark.parametrize("name", ["qwen3", rare("gemma2"), rare("gpt2")])
def test_threads_change_no_bit(name: str) -> None:
    """Guards what threads share: a pass takes as many as it is worth."""
    model = made(name, torch.bfloat16)
    alone = whole(model, TEXT)
    with limited(2):
        assert torch.equal(in_pieces(model, TEXT, random.Random(name)), alone)


def test_a_model_without_the_promise_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `Describe` on processors whose kernels for few rows round otherwise: the model is served, and promises nothing."""
    logits = Model.logits
    monkeypatch.setattr(Model, "logits", lambda model, rows: logits(model, rows) * (1 + sum(len(r.tokens) for r in rows) / 256))
    model = Model(build("llama").to(torch.bfloat16), cache_tokens=1024)
    assert not model.same_bits
    assert "logits may differ in their last bits from pass to pass" in model.summary
