"""What every request passes before it reaches a tier, by whatever protocol it came: keys, limits, places, counters."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

from cascade.answer import Chunk
from cascade.errors import CascadeError, InvalidRequest, TooLarge
from cascade.messages import Open, mint
from cascade.settings.config import CascadeConfig
from deployments.admission.access import Access, Account
from deployments.admission.gate import Gate, Life
from deployments.admission.metrics import Metrics
from deployments.admission.status import status_of

REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def request_id(given: str) -> str:
    """The name that a client gave its request; raises `InvalidRequest` if it is not fit for headers and logs."""
    if not REQUEST_ID.fullmatch(given):
        raise InvalidRequest("The request id is not 1 to 128 letters, digits, dots, colons, dashes or underscores")
    return given


@dataclass(eq=False, slots=True)
class Call:
    """One request while it is served."""

    id: str
    account: Account
    life: Life
    since: float = field(default_factory=time.monotonic)  # when it arrived


class Front:
    """Admits requests, and ends them before their time."""

    def __init__(self, config: CascadeConfig) -> None:
        self.limits = config.router.limits
        self.access = Access.load(config.router.access)
        self.gate = Gate(config.router.max_running, config.router.max_waiting)
        self.metrics = Metrics(self.gate, config.names)
        self._calls: set[Call] = set()

    @contextlib.contextmanager
    def call(
        self, account: Account, id: str | None, timeout_s: float | None, num_answers: int = 1, *, since: float
    ) -> Iterator[Call]:
        """Hold what a request needs that came at ``since``; raises `InvalidRequest`, `Overloaded` or `Unavailable` at once."""
        call = Call(mint() if id is None else request_id(id), account, Life.of(timeout_s), since)
        call.life.check()
        with account.admitted(num_answers), self.gate.admitted(num_answers):
            self._calls.add(call)
            try:
                yield call
            finally:
                self._calls.discard(call)

    def check_length(self, num_chars: int) -> None:
        """Raise `TooLarge` if a prompt has more characters than are tokenized."""
        most = self.limits.max_prompt_chars
        if num_chars > most:
            raise TooLarge(f"The prompt has {num_chars} characters: at most {most} are tokenized")

    def abort(self, account: Account, id: str) -> int:
        """End the requests of ``account`` with this id; how many there were."""
        found = [call for call in self._calls if call.id == id and call.account is account]
        for call in found:
            call.life.abort()
        return len(found)

    def abort_all(self) -> None:
        """End all requests: the server goes."""
        for call in list(self._calls):
            call.life.abort()

    async def counted(self, chunks: AsyncGenerator[Chunk, None], opening: Open, call: Call) -> AsyncGenerator[Chunk, None]:
        """``chunks`` when their turn has come, counted and charged."""
        outcome, num_tokens, last = "failed", 0, call.since
        call.account.charge(opening.prompt_len)
        try:
            async with self.gate.turn(call.life), contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if not chunk.token_ids and chunk.completion is None:  # of a watched request
                        yield chunk
                        continue
                    now = time.monotonic()
                    self.metrics.piece(now - last, first=num_tokens == 0)
                    num_tokens += len(chunk.token_ids)
                    call.account.charge(len(chunk.token_ids))
                    if chunk.completion is not None:
                        outcome = chunk.completion.finish_reason
                        self.metrics.completed(chunk.completion)
                    yield chunk
                    last = time.monotonic()
        except (GeneratorExit, asyncio.CancelledError):  # behind the last piece it is over anyway
            outcome = "left" if outcome == "failed" else outcome
            raise
        except CascadeError as error:
            outcome = status_of(error).code
            raise
        finally:
            self.metrics.ended(outcome, opening.prompt_len, num_tokens)
