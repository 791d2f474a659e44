"""The router: a stateless gRPC ingress that admits requests, drives the full tier and streams the answer."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import grpc
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from cascade.answer import Answer, Chunk, check_prompt
from cascade.config import CascadeConfig
from cascade.errors import CascadeError, DeadlineExceeded, InvalidRequest, ModelError, Overloaded, Unavailable
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
MAX_FRUITLESS = 20  # replays one after another without a new token

STATUS = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    ModelError: grpc.StatusCode.FAILED_PRECONDITION,
}


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
        tiers = await asyncio.gather(*(handle.describe.remote() for handle in handles.values()))
        self._max_model_len = self._config.max_model_len or min(tier["context_len"] for tier in tiers)
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
            response = pb.DescribeResponse(
                max_model_len=self._max_model_len, window=self._config.window, version=version("cascade-serve")
            )
            for tier in await asyncio.gather(*(h.describe.remote() for h in self._handles.values())):
                known = {name: tier[name] for name in pb.Tier.DESCRIPTOR.fields_by_name if name in tier}
                response.tiers.add(replicas=replicas.get(tier["name"], 0), **known)
            return response

    async def __del__(self) -> None:
        await self._downlink.close()

    # requests

    async def _chunks(self, request: pb.GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Drive the full tier until the answer is complete, on as many replicas as it takes."""
        opening = self._admit(request)
        answer = Answer(opening, self._tokenizer.decoder(opening.tokens))
        fruitless = 0
        while not answer.finished:
            before = answer.num_tokens
            reason = "it did not answer"
            async for chunk, failure in self._drive(answer):
                if chunk is not None:
                    yield chunk
                reason = failure or reason
            if answer.finished:
                return
            fruitless = 0 if answer.num_tokens > before else fruitless + 1
            if fruitless > MAX_FRUITLESS:
                raise Unavailable(f"The full tier failed {fruitless} times without a new token: {reason}")
            log.info("A request goes on from token %d on another full replica: %s", answer.num_tokens, reason)
            await asyncio.sleep(RETRY_S[min(fruitless, len(RETRY_S) - 1)])

    async def _drive(self, answer: Answer) -> AsyncIterator[tuple[Chunk | None, str]]:
        """Pieces from one session at the full tier, until the answer is complete or the session fails: why, at the end."""
        opening = answer.replay(mint())
        inbox = self._inboxes[opening.session] = asyncio.Queue()
        self._downlink.put([opening])
        try:
            while not answer.finished:
                try:
                    message = await asyncio.wait_for(inbox.get(), self._config.router.stall_timeout_s)
                except TimeoutError:
                    raise Unavailable("The full tier made no progress for too long") from None
                if isinstance(message, Failed):
                    yield None, message.reason
                    return
                assert isinstance(message, Proposal)
                chunk, commit = answer.take(message)
                if chunk is not None:
                    yield chunk, ""
                if commit is not None:
                    # acknowledged behind the yield: a client that does not read stalls the full tier at its window
                    self._downlink.put([commit])
        finally:
            del self._inboxes[opening.session]
            self._downlink.put([Close(opening.session)])

    def _admit(self, request: pb.GenerateRequest) -> Open:
        """Check everything a request says; raises `InvalidRequest`."""
        params = parse_sampling(request).seeded()
        speculation = parse_speculation(request)
        ids = parse_input(request, self._tokenizer)
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


def _count_replicas() -> dict[str, int]:
    """Running replicas of each deployment of this application."""
    application = serve.get_replica_context().app_name
    deployments = serve.status().applications[application].deployments
    return {name: sum(n for state, n in d.replica_states.items() if state == "RUNNING") for name, d in deployments.items()}
