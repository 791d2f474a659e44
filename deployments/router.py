"""The router: a stateless gRPC ingress that admits requests, drives the full tier and streams the answer."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import grpc
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from cascade.answer import Answer, Chunk, check_prompt
from cascade.config import CascadeConfig
from cascade.errors import CascadeError, DeadlineExceeded, InvalidRequest, ModelError, Overloaded, Unavailable
from cascade.grammar import Grammars
from cascade.messages import Close, Failed, Message, Open, Proposal
from cascade.tier import mint
from cascade.tokenizer import Tokenizer
from cascade.v1 import serving_pb2 as pb
from deployments.downlink import Downlink
from deployments.requests import finish, parse_input, parse_sampling, parse_speculation, tokens
from deployments.tier import lessor

log = logging.getLogger(__name__)

FULL_WINDOW = 256  # tokens the full tier may write that have not been handed to the client's stream
LEASE_TIMEOUT_S = 30.0  # a full replica may have to start first
RETRY_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # pauses before another full replica is tried
MAX_FRUITLESS = 8  # sessions that may fail one after another without a new token: some requests break whatever runs them
DESCRIBE_TIMEOUT_S = 5.0
LOWER_START_S = 60.0  # how much later than the full tier the others may be ready; the router does without those that are not
LONG_PROMPT = 2000  # characters from which tokenizing is left to a thread, so that other requests go on

STATUS = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    ModelError: grpc.StatusCode.FAILED_PRECONDITION,
}


class SessionFailed(Exception):
    """A session at the full tier is over before its answer is complete; the text goes on at another replica."""


@dataclass(slots=True)
class Patience:
    """How long a request may go on without a new token."""

    limit_s: float
    num_tokens: int = 0
    since: float = field(default_factory=time.monotonic)
    fruitless: int = 0  # sessions that failed since the last new token

    @property
    def left_s(self) -> float:
        return max(0.0, self.since + self.limit_s - time.monotonic())

    def saw(self, num_tokens: int) -> None:
        """The text is so long, and the client has it."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.since, self.fruitless = num_tokens, time.monotonic(), 0

    def failed(self, reason: str) -> float:
        """The pause before another replica is tried; raises `Unavailable` when that is enough."""
        self.fruitless += 1
        if self.fruitless > MAX_FRUITLESS:
            raise Unavailable(f"The full tier failed {self.fruitless} times without a new token: {reason}")
        if not self.left_s:
            raise Unavailable(f"The full tier made no progress for {self.limit_s:g} s: {reason}")
        return RETRY_S[min(self.fruitless, len(RETRY_S)) - 1]


class Router:
    """Serves `cascade.v1.Cascade`; ``handles`` are those of all tiers, bottom to top."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Mapping[str, Any], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        self._config = CascadeConfig.model_validate(config)
        self._handles = handles
        full = self._config.tiers[-1]
        engine = full.engine_kwargs
        source = full.model_loading_config.source
        self._tokenizer = await asyncio.to_thread(
            Tokenizer.from_pretrained, source, revision=engine.revision, trust_remote_code=engine.trust_remote_code
        )
        self._grammars = Grammars(self._tokenizer)
        tiers = await self._wait_for_tiers()
        self._max_model_len = min(self._config.max_model_len or 2**31, *(tier["context_len"] for tier in tiers))
        self._num_ids = min(tier["vocab_size"] for tier in tiers)
        self._inboxes: dict[str, asyncio.Queue[Message]] = {}
        self._downlink = Downlink({full.name: lessor(handles[full.name])}, self._hear, lease_timeout_s=LEASE_TIMEOUT_S)

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer, piece by piece."""
        with status(grpc_context):
            async with contextlib.aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    end = None if chunk.completion is None else finish(chunk.completion)
                    yield pb.GenerateResponse(text=chunk.text, tokens=tokens(chunk), finish=end)

    async def Complete(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.CompleteResponse:
        """The whole answer."""
        response = pb.CompleteResponse()
        num_chars = 0
        with status(grpc_context):
            async with contextlib.aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    response.tokens.extend(tokens(chunk, num_chars))
                    num_chars += len(chunk.text)
                    if chunk.completion is not None:
                        response.text = chunk.completion.text
                        response.finish.CopyFrom(finish(chunk.completion))
        return response

    async def Describe(self, request: pb.DescribeRequest, grpc_context: RayServegRPCContext) -> pb.DescribeResponse:
        """What is served, and how many replicas run."""
        with status(grpc_context):
            replicas = await asyncio.to_thread(_count_replicas)
            states = await asyncio.gather(*(ask(handle, DESCRIBE_TIMEOUT_S) for handle in self._handles.values()))
            response = pb.DescribeResponse(
                max_model_len=self._max_model_len, window=self._config.window, version=version("cascade-serve")
            )
            for tier, state in zip(self._config.tiers, states, strict=True):
                state = state or {"name": tier.name, "model": tier.model_loading_config.model_id}
                known = {name: state[name] for name in pb.Tier.DESCRIPTOR.fields_by_name if name in state}
                response.tiers.add(replicas=replicas.get(tier.name, 0), **known)
            return response

    async def __del__(self) -> None:
        await self._downlink.close()

    async def _wait_for_tiers(self) -> list[dict[str, Any]]:
        """What the tiers say of themselves: the full one however long it takes to start, the others if they are ready soon."""
        *lower, full = self._handles.values()
        state = await full.describe.remote()
        return [state, *filter(None, await asyncio.gather(*(ask(handle, LOWER_START_S) for handle in lower)))]

    # requests

    async def _chunks(self, request: pb.GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Drive the full tier until the answer is complete, on as many replicas as it takes."""
        opening = await self._admit(request)
        answer = Answer(opening, self._tokenizer.decoder(opening.tokens))
        patience = Patience(self._config.router.stall_timeout_s)
        while not answer.finished:
            try:
                async with contextlib.aclosing(self._drive(answer, patience)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except SessionFailed as failure:
                pause_s = patience.failed(str(failure))
                log.info("A request goes on from token %d on another full replica: %s", answer.num_tokens, failure)
                await asyncio.sleep(pause_s)

    async def _drive(self, answer: Answer, patience: Patience) -> AsyncGenerator[Chunk, None]:
        """Pieces from one session at the full tier, until the answer is complete; raises `SessionFailed`."""
        opening = answer.replay(mint())
        inbox = self._inboxes[opening.session] = asyncio.Queue()
        self._downlink.put([opening])
        try:
            while not answer.finished:
                try:
                    async with asyncio.timeout(patience.left_s):  # `wait_for` swallows a cancel that comes with a message
                        message = await inbox.get()
                except TimeoutError:
                    raise Unavailable(f"The full tier made no progress for {patience.limit_s:g} s") from None
                if isinstance(message, Failed):
                    raise SessionFailed(message.reason)
                assert isinstance(message, Proposal)
                chunk, commit = answer.take(message)
                if chunk is not None:
                    yield chunk
                if commit is not None:
                    # acknowledged behind the yield: a client that does not read stalls the full tier at its window
                    self._downlink.put([commit])
                patience.saw(answer.num_tokens)
        finally:
            del self._inboxes[opening.session]
            self._downlink.put([Close(opening.session)])

    async def _admit(self, request: pb.GenerateRequest) -> Open:
        """Check everything a request says; raises `InvalidRequest`."""
        params = parse_sampling(request).seeded()
        params.check_vocabulary(self._num_ids)
        if params.structured is not None:
            await asyncio.to_thread(self._grammars.check, params.structured)
        speculation = parse_speculation(request)
        if len(request.prompt) < LONG_PROMPT:
            ids = parse_input(request, self._tokenizer)
        else:
            ids = await asyncio.to_thread(parse_input, request, self._tokenizer)
        problem = check_prompt(ids, params.max_tokens, self._num_ids, self._max_model_len)
        if problem:
            raise InvalidRequest(problem)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._tokenizer.end_ids)
        names = self._config.names
        return Open(
            session=mint(),
            tokens=tuple(ids),
            prompt_len=len(ids),
            params=params,
            ends=ends,
            tier=names[-1],
            chain=speculation.chain(names),
            window=FULL_WINDOW,
            draft_window=speculation.window or self._config.window,
            lockstep=speculation.schedule == "lockstep",
        )

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            inbox = self._inboxes.get(message.session)
            if inbox is not None:
                inbox.put_nowait(message)


@contextlib.contextmanager
def status(context: RayServegRPCContext) -> Iterator[None]:
    """Give errors their gRPC status and their sentence; a client never sees a traceback."""
    try:
        yield
    except CascadeError as error:
        context.set_code(next((code for kind, code in STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL))
        context.set_details(str(error))
        raise
    except Exception:
        log.exception("A request failed")
        context.set_code(grpc.StatusCode.INTERNAL)
        context.set_details("The server failed; its log says why")
        raise


async def ask(handle: DeploymentHandle, timeout_s: float) -> dict[str, Any] | None:
    """What a tier says of itself; ``None`` if no replica answers in time."""
    response = handle.describe.remote()
    try:
        async with asyncio.timeout(timeout_s):
            state: dict[str, Any] = await response
    except Exception as error:  # whatever Ray raises: there is no such replica
        log.info("A tier does not answer: %s", error)
        response.cancel()
        return None
    return state


def _count_replicas() -> dict[str, int]:
    """Running replicas of each deployment of this application."""
    application = serve.get_replica_context().app_name
    deployments = serve.status().applications[application].deployments
    return {name: sum(n for state, n in d.replica_states.items() if state == "RUNNING") for name, d in deployments.items()}
