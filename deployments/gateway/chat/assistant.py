"""The assistant whose turn it is: what conversations ask of the full tier, by whatever protocol they come."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import SamplingParams
from deployments.gateway.admission.admission import Admission
from deployments.gateway.chat.conversation import ChatMessage, Conversation, ToolBody
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.chat.template import Style
from deployments.gateway.chat.thoughts import TAIL, ThoughtSplitter, opened, prompted
from deployments.gateway.chat.tools import Toolbox, ToolPlan

LONG_PROMPT = 2000  # characters from which tokenizing is left to a thread, so that other requests go on


@dataclass(frozen=True, slots=True)
class ChatTask:
    """What a conversation asks of the full tier."""

    ids: list[int]  # of the prompt
    params: SamplingParams
    reader: Callable[[], TurnReader] | None  # of each answer, if it may call tools or think

    def new_reader(self) -> TurnReader | None:
        """Of one answer, likewise."""
        return None if self.reader is None else self.reader()


class Assistant:
    """The assistant that a served model is.

    ``tool_format`` is how it writes calls, found out by its template if not given; ``check`` raises `InvalidRequest` for
    parameters that no tier could honour.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_format: str | None,
        front: Admission,
        max_model_len: int,
        check: Callable[[SamplingParams], Awaitable[None]],
    ) -> None:
        self._tokenizer = tokenizer
        self._toolbox = Toolbox(tokenizer, tool_format)
        self._front = front
        self._max_model_len = max_model_len
        self._check = check

    @property
    def variables(self) -> tuple[str, ...]:
        """Names that the model's chat template reads and that clients may set."""
        return self._toolbox.template.variables

    async def task(self, said: Conversation, sampled: Callable[[int], SamplingParams]) -> ChatTask:
        """``sampled`` says how tokens are chosen, given how many there is room for; raises `InvalidRequest`."""
        plan = self._toolbox.plan(said)
        ids = await self.encode(said.messages, said.tools if plan.shown else None, said.style)
        room = self._max_model_len - len(ids)
        params = sampled(max(1, min(room, self._front.limits.max_tokens or room)))
        within, held = self._thinks(said, ids), await self._held_to(plan, params)
        if held.structured is not None and within is not None:
            held, within = await self._held_behind(plan, held, within)
        return ChatTask(ids, held, self._reader(said, plan, within))

    async def encode(self, messages: Sequence[ChatMessage], tools: Sequence[ToolBody] | None, style: Style) -> list[int]:
        """Token ids of a conversation; raises `InvalidRequest`."""
        said = [message.given for message in messages]
        shown = None if tools is None else [tool.given for tool in tools]
        num_chars = sum(message.num_chars for message in messages) + len(str(shown or ""))
        self._front.check_length(num_chars)
        encode = self._toolbox.template.encode
        if num_chars < LONG_PROMPT:
            return encode(said, shown, style)
        return await asyncio.to_thread(encode, said, shown, style)

    async def _held_to(self, plan: ToolPlan, params: SamplingParams) -> SamplingParams:
        """``params`` that make the text calls of tools; raises `InvalidRequest`."""
        if plan.structured is None:
            return params
        if params.structured is not None:
            raise InvalidRequest("tools and response_format or structured are both enforced: leave one out")
        if params.ignore_eos:
            raise InvalidRequest("ignore_eos is true: with tools whose calls are enforced the text must end")
        for index, schema in plan.schemas.items():
            try:
                await self._check(replace(params, structured=schema))
            except InvalidRequest as error:
                where = f"tools.{index}.function.parameters"
                raise InvalidRequest(str(error).replace("structured.json_schema", where)) from None
        return replace(params, structured=plan.structured)

    async def _held_behind(self, plan: ToolPlan, held: SamplingParams, within: bool) -> tuple[SamplingParams, bool | None]:
        """``held`` with room for thoughts, and what then holds for `_thinks`; raises `InvalidRequest`.

        A grammar that leaves words free before calls leaves thoughts free, too. Any other begins with the first token, so there
        are thoughts only if the prompt has begun them.
        """
        assert held.structured is not None
        if plan.structured is not None and plan.free and plan.form is not None and plan.form.begin:
            return held, within
        if not within:
            return held, None
        await self._check(held)
        structured = self._toolbox.grammars.after_thoughts(held.structured, plan.structured is not None)
        return replace(held, structured=structured), True

    def _thinks(self, said: Conversation, ids: Sequence[int]) -> bool | None:
        """Whether the prompt ends within thoughts; ``None`` if no thoughts are to be told apart after it."""
        if said.separate_reasoning is False or not self._toolbox.template.thinks:
            return None
        if said.continue_final_message:
            last = said.messages[-1]
            return None if last.thoughts and not opened(last.text) else opened(last.text)
        return prompted(self._tokenizer.backend.decode(list(ids[-TAIL:]), skip_special_tokens=False))

    def _reader(self, said: Conversation, plan: ToolPlan, within: bool | None) -> Callable[[], TurnReader] | None:
        """Of each answer, if there is something to take apart."""
        if within is None and plan.form is None:
            return None
        told = said.include_reasoning is not False
        return lambda: self._toolbox.reader(plan, None if within is None else ThoughtSplitter(within), told)
