"""A whole cascade in one process: a thread for each tier, joined by links in memory."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias, overload

from cascade import family
from cascade.answer import Answer, Chunk, Completion
from cascade.drafters import AUTO, DrafterSpec, check_drafters, head_of, make, specs
from cascade.drafters.in_pass import InPass
from cascade.engine import generation
from cascade.engine.grammar import Grammars
from cascade.engine.layers import Layers, numbers
from cascade.engine.models import Loaded, load_all, load_on_vllm
from cascade.engine.sampling.state import state_maker
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError, InvalidRequest
from cascade.messages import Capabilities, Link, Message
from cascade.params import DEFAULT_WINDOW, MAX_WINDOW, Handling, SamplingParams, Speculation, checked
from cascade.planner.chains import Planner
from cascade.planner.choice import Policy
from cascade.scorer import Drafter, Scorer
from cascade.tier.local_links import Deliver, Mailbox, Requests, join
from cascade.tier.runner import measure
from cascade.tier.tier import Tier

Prompt: TypeAlias = str | Sequence[int]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None  # one for all prompts, or one for each
Batch: TypeAlias = Sequence[str] | Sequence[Sequence[int]]
Prompts: TypeAlias = Prompt | Batch
Drafters: TypeAlias = str | DrafterSpec | Iterable[str | DrafterSpec] | None

TIER_NAMES = {
    1: ("full",),
    2: ("tiny", "full"),
    3: ("tiny", "medium", "full"),
    4: ("tiny", "small", "medium", "full"),
    5: ("tiny", "small", "medium", "large", "full"),
}
LOADERS: dict[str, Callable[..., Sequence[Loaded]]] = {"cascade": load_all, "vllm": load_on_vllm}  # by engine
ANSWER_WINDOW = 4096  # tokens that the full tier may write before the caller takes them


class Cascade:
    """One to five models of a family. Output is exactly the last one's; the others make it faster.

    >>> with Cascade.demo() as cascade:
    ...     print(cascade.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0)).text)

    ``models`` go bottom to top. Safe to use from several threads and event loops at once.
    """

    def __init__(
        self,
        models: Sequence[Scorer],
        tokenizer: Tokenizer,
        *,
        names: Sequence[str] | None = None,
        window: int = DEFAULT_WINDOW,
        policy: Policy = Policy(),
        drafter: Drafters = AUTO,
        default_params: SamplingParams | None = None,
    ) -> None:
        """Start a thread for each tier.

        - ``models``, bottom to top: one to five, all with the vocabulary of ``tokenizer`` (`from_pretrained` loads them).
        - ``names``: one a model, for `Speculation.tiers` and statistics; for three models ``tiny``, ``medium``, ``full``.
        - ``window``: tokens that a tier may run ahead of the one above it, unless a request says otherwise.
        - ``drafter``: kinds of drafters inside every tier, see `cascade.drafters`; ``None`` for none. A head
          belongs to the last model; others keep the heads that they were loaded with.
        - ``default_params``: sampling parameters of requests that give none.
        - ``policy``: how long a pass waits for guesses, and how many it scores (`cascade.planner.choice.Policy`).

        Raises `ConfigError` if there are too few or too many models, or not one name for each.
        """
        names = tier_names(models, names)
        if not isinstance(window, int) or not 1 <= window <= MAX_WINDOW:
            raise ConfigError(f"window is {window!r}: it must be an integer from 1 to {MAX_WINDOW}")
        kinds, drafters = _drafters(models, drafter, tokenizer)
        check_drafters(kinds, names)
        self.names = (*kinds, *names)  # bottom to top
        self.tokenizer = tokenizer
        self.default_params = default_params or SamplingParams()
        self._loaded: Sequence[Loaded] = ()  # models that `from_pretrained` has loaded, and `close` must close
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}  # mailboxes of event loops that wait for answers
        grammars = Grammars(tokenizer)
        devices = [str(getattr(model, "device", "cpu")) for model in models]
        self.tiers = tuple(
            Tier(
                name,
                level,
                model,
                policy=policy,
                planner=Planner([other for other, its in zip(names, devices, strict=True) if its == device]),
                profile=apart(partial(measure, model, max_tokens=64, budget_s=0.3)),  # short, since the caller waits
                new_state=state_maker(grammars.matcher),
                drafters=inner,
            )
            for level, (name, model, device, inner) in enumerate(zip(names, models, devices, drafters, strict=True), len(kinds))
        )
        self.context_len = min(*(model.context_len for model in models), self.tiers[-1].kv_admission.num_tokens)
        self._capabilities = Capabilities(
            self.names,
            drafters=kinds,
            vocab_size=min(model.vocab_size for model in models),
            context_len=self.context_len,
            end_ids=tokenizer.end_ids,
            adapters=getattr(models[-1], "adapters", ()),
            check_grammar=grammars.check,
            window=window,
            answer_window=ANSWER_WINDOW,
        )
        join(self.tiers)
        for tier in self.tiers:
            tier.start()

    @classmethod
    def from_pretrained(
        cls,
        models: Sequence[str],
        *,
        dtype: str | None = None,
        device: str | None = None,
        names: Sequence[str] | None = None,
        window: int = DEFAULT_WINDOW,
        policy: Policy = Policy(),
        trust_remote_code: bool = False,
        drafter: Drafters = AUTO,
        engine: Literal["cascade", "vllm"] = "cascade",
        generation_config: str = generation.AUTO,
        layers: Mapping[str, Layers] = MappingProxyType({}),
    ) -> Self:
        """Load ``models`` bottom to top, each a local path or a Hugging Face hub id.

        - ``dtype``, ``device``: such as ``"bfloat16"``, ``"cuda:0"``; by default the checkpoint's, and the GPU if there is one.
        - ``names``: one a model; of three ``tiny``, ``medium``, ``full``.
        - ``window``: tokens that a tier may run ahead of the one above it, unless a request sets its own.
        - ``policy``: how long a pass waits for guesses, and how many it scores (`cascade.planner.choice.Policy`).
        - ``drafter``: drafters inside every tier, by kind; ``None`` for none. A head belongs to the last model.
        - ``engine``: "vllm" runs all models on vLLM. Its other arguments: load `cascade.engine.vllm.model.VllmModel`s instead.
        - ``generation_config``: defaults of requests: "auto" for the last model's own, "vllm" for none, or a folder with one.
        - ``layers``: layers of its model that a tier keeps: `{"tiny": ["0-11", "20-31"]}`, or the first 16: `{"tiny": 16}`.

        Raises `ModelError` if a model cannot be loaded, `ConfigError` if they do not belong together.
        """
        names, inner = tier_names(models, names), specs(drafter)
        check_drafters([drafter.kind for drafter in inner], names)
        if engine not in LOADERS:
            raise ConfigError(f"engine is {engine!r}: it must be one of {', '.join(LOADERS)}")
        tokenizer = common_tokenizer(models, trust_remote_code)
        default_params = SamplingParams(**generation.sampling_defaults(models[-1], generation_config))
        options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        parts = list(zip(models, _kept(layers, names), strict=True))
        loaded = LOADERS[engine](parts, head_of(inner), options)
        cascade = cls(
            loaded, tokenizer, names=names, window=window, policy=policy, drafter=inner, default_params=default_params
        )
        cascade._loaded = loaded
        return cascade

    @classmethod
    def demo(cls, *, dtype: str | None = None, device: str | None = None, drafter: Drafters = AUTO) -> Self:
        """The demonstration family: SmolLM2-135M-Instruct, and two models that this package ships below it.

        Raises `ModelError` if the full model is not found.
        """
        models, sampling = family.paths(), str(family.WEIGHTS / family.NAMES[-1])
        return cls.from_pretrained(models, dtype=dtype, device=device, drafter=drafter, generation_config=sampling)

    # requests

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, and meant as one prompt
        self, prompt: Prompt, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Batch, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Prompts, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> Completion | list[Completion]:
        """The whole text after ``prompt``, a string or a list of token ids. A list of prompts gives a list of texts.

        Raises `InvalidRequest`, or `Unavailable` if the full tier fails.
        """
        completions = _sorted([c.completion for c in self.stream(prompt, params, speculation, handling)])
        return completions if _is_batch(prompt) else completions[0]

    def stream(
        self, prompt: Prompts, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> Iterator[Chunk]:
        """The text piece by piece. For a batch, pieces of all texts as they come; ``index`` is the number of the text."""
        inbox: queue.SimpleQueue[Sequence[Message]] = queue.SimpleQueue()
        answers = self._admit(prompt, params, speculation, handling, Deliver(inbox.put))
        return answers.run(inbox.get)

    async def agenerate(
        self, prompt: Prompts, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> Completion | list[Completion]:
        """`generate` for an event loop."""
        completions = _sorted([c.completion async for c in self.astream(prompt, params, speculation, handling)])
        return completions if _is_batch(prompt) else completions[0]

    async def astream(
        self, prompt: Prompts, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> AsyncIterator[Chunk]:
        """`stream` for an event loop; leaving the loop early ends the request."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop) or Mailbox(loop)
        answers = self._admit(prompt, params, speculation, handling, mailbox)
        self._mailboxes[loop] = mailbox
        try:
            with mailbox.reading(answers.sessions) as inbox:
                answers.open()
                while not answers.finished:
                    for chunk in answers.receive(await inbox.get()):
                        yield chunk
        finally:
            answers.close()
            if mailbox.idle:
                self._mailboxes.pop(loop, None)

    def close(self) -> None:
        """End all requests and free everything."""
        for tier in reversed(self.tiers):
            tier.close()
        for model in self._loaded:
            model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _admit(
        self, prompt: Prompt | Batch, params: Params, speculation: Speculation | None, handling: Handling | None, link: Link
    ) -> Requests:
        how = checked("speculation", speculation, Speculation), checked("handling", handling, Handling)
        begin, answers = time.monotonic(), []
        prompts = prompt if _is_batch(prompt) else [prompt]
        for index, (text, chosen) in enumerate(zip(prompts, self._sampled(params, len(prompts)), strict=True)):
            spec = self._capabilities.admit(self._encode(text), chosen, *how)
            decoder = self.tokenizer.decoder(spec.tokens)
            answers.append(Answer(spec, decoder, index, lambda: time.monotonic() - begin))
        return Requests(self.tiers[-1], answers, link)

    def _sampled(self, params: Params, num_prompts: int) -> Sequence[SamplingParams]:
        """Parameters of each prompt; raises `InvalidRequest`."""
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params] * num_prompts
        if not (isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params)):
            raise InvalidRequest(f"params is {params!r:.60}: it must be a SamplingParams, or a list with one for each prompt")
        if len(params) != num_prompts:
            raise InvalidRequest(f"There are {num_prompts} prompts and {len(params)} SamplingParams: give one for each, or one")
        return params

    def _encode(self, prompt: object) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if (ids := token_ids(prompt)) is None:
            raise InvalidRequest(f"A prompt is a string or a list of token ids, not {type(prompt).__name__}")
        return ids


def token_ids(given: Any) -> list[int] | None:
    """Token ids of a list or an array; ``None`` for anything else."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        return None
    whole = all(isinstance(token, Integral) and not isinstance(token, bool) for token in listed)
    return [int(token) for token in listed] if whole else None


def _is_batch(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], Integral)


def _sorted(completions: Sequence[Completion | None]) -> list[Completion]:
    return sorted((c for c in completions if c is not None), key=lambda c: c.index)


def tier_names(models: Sequence[object], names: Sequence[str] | None) -> tuple[str, ...]:
    """A name for each model; raises `ConfigError` if there are too few or too many of either."""
    if isinstance(models, str):
        raise ConfigError(f"models is {models!r}: give a list, bottom to top")
    if not 1 <= len(models) <= len(TIER_NAMES):
        raise ConfigError(f"models has {len(models)} entries: a cascade has 1 to {len(TIER_NAMES)} tiers")
    if names is not None and not len(set(names)) == len(names) == len(models):
        raise ConfigError(f"names is {names!r}: give each of the {len(models)} models a name of its own")
    return tuple(names or TIER_NAMES[len(models)])


def common_tokenizer(sources: Sequence[str], trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of all models; raises `ConfigError` if they have different ones."""
    tokenizers = [Tokenizer.from_pretrained(source, trust_remote_code=trust_remote_code) for source in sources]
    for source, tokenizer in zip(sources, tokenizers, strict=True):
        if tokenizer.fingerprint != tokenizers[-1].fingerprint:
            raise ConfigError(f"{source} and {sources[-1]} have different tokenizers: the models of a cascade must share one")
    return tokenizers[-1]


def _kept(layers: Mapping[str, Layers], names: Sequence[str]) -> list[tuple[int, ...]]:
    """Layers of each tier, none for all; raises `ConfigError`."""
    if unknown := sorted(layers.keys() - {*names}):
        raise ConfigError(f"layers names {unknown[0]!r}, which is no tier: they are {', '.join(names)}")
    kept = []
    for name in names:
        try:
            kept.append(numbers(layers[name]) if name in layers else ())
        except ConfigError as error:
            raise ConfigError(f"layers of {name}: {error}") from None
    return kept


def _drafters(models: Sequence[Scorer], chosen: Drafters, tokenizer: Tokenizer) -> tuple[tuple[str, ...], list[list[Drafter]]]:
    """Kinds of the drafters inside tiers, and the drafters of each model; heads were loaded with their models."""
    inner = [spec for spec in specs(chosen) if not spec.reads]
    heads: list[str] = [getattr(model, "drafter", "") for model in models]
    kinds = tuple(dict.fromkeys([*(spec.kind for spec in inner), *filter(None, heads)]))
    drafters = [make(inner, kinds, tokenizer.encode_part) for _ in models]
    for head, its in zip(heads, drafters, strict=True):
        its += [InPass(head, kinds.index(head))] if head else []
    return kinds, drafters
