"""Checks a request and turns it into a session of the full tier. Used by the library and the router."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cascade.errors import ContextLengthExceeded, InvalidRequest
from cascade.messages import SessionSpec
from cascade.params import Handling, SamplingParams, Speculation, Structured, check_adapter

SEED_MISSING = "resume has tokens and seed is missing: give the seed that came with the answer's first piece"


@dataclass(frozen=True, slots=True)
class Task:
    """A request as tokens and parameters."""

    ids: Sequence[int]  # the prompt
    params: SamplingParams
    speculation: Speculation = field(default_factory=Speculation)
    handling: Handling = field(default_factory=Handling)
    delivered: Sequence[int] = ()  # tokens of the answer that the client got before its stream broke off


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a cascade can serve, and the defaults of requests."""

    names: tuple[str, ...]  # drafters inside tiers and tiers, bottom to top
    vocab_size: int
    context_len: int  # positions of prompt and output together
    end_ids: frozenset[int]  # tokens that end a text, unless `ignore_eos`
    adapters: tuple[str, ...]  # the full tier's
    # raises `InvalidRequest` if a grammar cannot be compiled, or does not allow these tokens
    check_grammar: Callable[[Structured, Sequence[int]], object]
    window: int  # tokens that a tier may run ahead of the one above, unless the request says otherwise
    answer_window: int  # tokens that the full tier may write before the client takes them
    drafters: tuple[str, ...] = ()  # the ``names`` of drafters inside tiers
    max_tokens: int | None = None  # output tokens of an answer at most

    def check(self, params: SamplingParams, delivered: Sequence[int] = ()) -> None:
        """Raise `InvalidRequest` if a parameter cannot be honoured, also after the ``delivered`` tokens of the answer.

        Compiles a grammar that is new.
        """
        if self.max_tokens is not None and params.max_tokens > self.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}: this server writes at most {self.max_tokens}", "max_tokens"
            )
        params.check_vocabulary(self.vocab_size)
        check_adapter(params.adapter, self.adapters)
        if delivered and params.seed is None:
            raise InvalidRequest(SEED_MISSING, "seed")
        self._check_ids(delivered)
        if len(delivered) > params.max_tokens:
            raise InvalidRequest(
                f"resume has {len(delivered)} tokens of an answer: max_tokens is {params.max_tokens}", "resume"
            )
        if params.structured is not None:
            self.check_grammar(params.structured, delivered)

    def admit(self, task: Task) -> SessionSpec:
        """The session of the full tier for a task; draws a seed if the task has none.

        Raises `InvalidRequest` if the prompt cannot be served, or a parameter cannot be honoured.
        """
        ids, params, speculation = task.ids, task.params, task.speculation
        self.check(params, task.delivered)
        if not ids:
            raise InvalidRequest("The prompt is empty: it must have at least one token", "prompt")
        self._check_ids(ids)
        if params.max_tokens > room(len(ids), self.context_len):
            raise ContextLengthExceeded(
                f"The prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}, together "
                f"{len(ids) + params.max_tokens}: {_most(self.context_len)}; shorten it, or lower max_tokens",
                "max_tokens",
            )
        chosen = speculation.chosen(self.names)
        return SessionSpec(
            tokens=(*ids, *task.delivered),
            prompt_len=len(ids),
            params=params.seeded(),
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids),
            tier=self.names[-1],
            chain=tuple(name for name in chosen if name not in self.drafters),
            drafters=tuple(name for name in chosen if name in self.drafters),
            window=self.answer_window,
            draft_window=speculation.draft_window(self.window),
            draft_branches=speculation.most_branches,
            adaptive=speculation.adaptive,
            priority=task.handling.priority,
            cache_salt=task.handling.cache_salt,
        )

    def _check_ids(self, ids: Sequence[int]) -> None:
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"Token id {wrong} is out of range: ids go from 0 to {self.vocab_size - 1}", "prompt")


def room(prompt_tokens: int, context_len: int, param: str = "prompt") -> int:
    """Tokens that an answer to a prompt can have; raises `ContextLengthExceeded`, with the field ``param``, if none.

    The message has the phrases by which agents for OpenAI's and Anthropic's APIs recognise that they must shorten a
    conversation.
    """
    if prompt_tokens >= context_len:
        raise ContextLengthExceeded(
            f"prompt is too long: {prompt_tokens} tokens > {context_len - 1} maximum; {_most(context_len)}, one at least of "
            "them for the answer: shorten it",
            param,
        )
    return context_len - prompt_tokens


def _most(context_len: int) -> str:
    return f"this model's maximum context length is {context_len} tokens"
