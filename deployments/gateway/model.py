"""The served model for requests: names, tokenizer, defaults, and checks of parameters."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from cascade.answer import Answer, Chunk
from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.generation import sampling_defaults
from cascade.engine.grammar import Grammars
from cascade.engine.spelling import Spelling
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest, NotFound, TooLarge
from cascade.messages import Capabilities, SessionSpec
from cascade.params import Handling, SamplingParams, Speculation, Structured
from cascade.settings.config import CascadeConfig
from cascade.settings.engine import generation_folder
from deployments.links.replica_status import Tiers

P = ParamSpec("P")
T = TypeVar("T")

# threads for work that would block the event loop, a pool for each kind, so that none waits for another; look-ups on disks and
# networks use asyncio's own threads
TEXT = ThreadPoolExecutor(2, "text")  # tokenizes and decodes long texts, tenths of a second at most
GRAMMARS = ThreadPoolExecutor(2, "grammars")  # compiles grammars, which may take seconds
LONG = 2000  # characters or tokens from which a text is processed in a thread
STREAM_WINDOW = 256  # tokens that the full tier may write before the client's stream takes them


async def in_thread(pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run ``work`` in a thread of ``pool``."""
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **options))


async def reading(length: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run ``work`` on a text of this length; in a thread if the text is long, so that other requests continue."""
    return work(*args, **options) if length < LONG else await in_thread(TEXT, work, *args, **options)


class ServedModel:
    """The served model, from `load` on. Long texts are processed in threads, so that other requests continue."""

    async def load(self, config: CascadeConfig, tiers: Tiers) -> None:
        """Load what a router needs of the full tier's model; raises `ModelError`."""
        full = config.tiers[-1]
        engine, source = full.engine_kwargs, full.model_loading_config.source
        self.tokenizer = tokenizer = await asyncio.to_thread(Tokenizer.from_pretrained, source, **engine.hub)
        generation = generation_folder(engine.generation_config)
        # default arguments of `SamplingParams`
        self.defaults = await asyncio.to_thread(sampling_defaults, source, generation, revision=engine.revision)
        self._folder = None if engine.lora_path is None else await asyncio.to_thread(AdapterFolder, engine.lora_path)
        await tiers.start()
        self._grammars = Grammars(tokenizer)
        await asyncio.to_thread(self._grammars.prepare)
        self.names = config.model_names  # answers have the first one
        self.chain_names = config.chain_names  # drafters inside tiers and tiers, bottom to top
        self.limits = config.router.limits
        self.context_len = min(config.max_model_len or 2**31, tiers.limit("context_len"))  # prompt and answer together
        self._spelling: asyncio.Task[Spelling] | None = None
        self._capabilities = Capabilities(
            config.chain_names,
            drafters=config.drafters,
            vocab_size=tiers.limit("vocab_size"),
            context_len=self.context_len,
            end_ids=tokenizer.end_ids,
            adapters=tuple(engine.lora_modules),
            check_grammar=self._grammars.check,
            window=config.window,
            answer_window=STREAM_WINDOW,
            max_tokens=self.limits.max_tokens,
        )

    # names

    async def adapters(self) -> Sequence[str]:
        """Names of all adapters that the full tier has or can load."""
        return self._capabilities.adapters if self._folder is None else await asyncio.to_thread(self._folder.names)

    async def adapter(self, name: str | None) -> str | None:
        """The adapter in a request's ``model`` (ADAPTER or MODEL:ADAPTER); ``None`` for the model itself. Raises `NotFound`."""
        if name is None or name in self.names:
            return None
        model, _, adapter = name.rpartition(":")
        named = adapter if model in self.names else name
        if not await self._has(named):
            names = ", ".join(map(repr, (*self.names, *await self.adapters())))
            raise NotFound(f"model is {name[:200]!r}: this server has {names[:200]}", "model")
        return named

    async def _has(self, adapter: str) -> bool:
        """Whether there is an adapter of this name; if it is in the folder, it can be used from then on."""
        if adapter in self._capabilities.adapters:
            return True
        if self._folder is None or not adapter or not await asyncio.to_thread(self._folder.has, adapter):
            return False
        if adapter not in (adapters := self._capabilities.adapters):
            self._capabilities = replace(self._capabilities, adapters=(*adapters, adapter))
        return True

    # defaults

    def defaults_for(self, prompt_tokens: int, max_tokens: int | None = None) -> dict[str, Any]:
        """Default arguments of `SamplingParams`. ``max_tokens`` is the model's, else the argument, or what the context leaves.

        It is never more than the context leaves, or than the server's limit.
        """
        left = max(1, self.context_len - prompt_tokens)  # prompts that are too long are refused at admission
        most = self.defaults.get("max_tokens", left if max_tokens is None else max_tokens)
        return {**self.defaults, "max_tokens": min(most, left, self.limits.max_tokens or left)}

    # text

    def check_length(self, num_chars: int) -> None:
        """Raise `TooLarge` if a prompt has more characters than are tokenized."""
        most = self.limits.max_prompt_chars
        if num_chars > most:
            raise TooLarge(f"The prompt has {num_chars} characters: at most {most} are tokenized")

    async def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Token ids of a prompt; raises `TooLarge`."""
        if not isinstance(prompt, str):
            return prompt
        self.check_length(len(prompt))
        return await reading(len(prompt), self.tokenizer.encode, prompt)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; raises `InvalidRequest` for ids that do not exist."""
        most = self.tokenizer.num_ids
        wrong = next((token for token in ids if token >= most), None)
        if wrong is not None:
            raise InvalidRequest(f"Token id {wrong} is out of range: ids go from 0 to {most - 1}", "prompt")
        return await reading(len(ids), self.tokenizer.decode, ids)

    async def spelling(self) -> Spelling:
        """The spelling of tokens; the first call takes up to a second."""
        if self._spelling is None:
            self._spelling = asyncio.create_task(in_thread(TEXT, Spelling, self.tokenizer))
        return await asyncio.shield(self._spelling)

    async def answer(self, spec: SessionSpec, index: int = 0, elapsed: Callable[[], float] | None = None) -> Answer:
        """An answer, which continues after the part that the client already has."""
        decoder = self.tokenizer.decoder(spec.tokens[: spec.prompt_len])
        return await reading(len(spec.tokens) - spec.prompt_len, Answer, spec, decoder, index, elapsed)

    # parameters

    async def admit(
        self, ids: Sequence[int], params: SamplingParams, speculation: Speculation, handling: Handling, delivered: Sequence[int]
    ) -> SessionSpec:
        """`Capabilities.admit`, also with an adapter of the folder."""
        await self._has(params.adapter)
        admit = partial(self._capabilities.admit, ids, params, speculation, handling, delivered)
        return admit() if params.structured is None else await in_thread(GRAMMARS, admit)  # may compile a grammar

    async def delivered(self, specs: Sequence[SessionSpec]) -> list[Chunk]:
        """The parts of resumed answers that clients already have; raises `InvalidRequest` if all answers are complete."""
        delivered = [(await self.answer(spec)).delivered for spec in specs]
        if all(chunk.completion is not None for chunk in delivered):
            raise InvalidRequest("resume has all tokens of the answer: it has ended, and nothing is left to be written")
        return delivered

    async def check_grammar(self, structured: Structured) -> None:
        """Raise `InvalidRequest` if a grammar cannot be compiled."""
        await in_thread(GRAMMARS, self._grammars.check, structured, ())
