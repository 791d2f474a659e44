"""The router: a stateless ingress, gRPC and HTTP, that admits requests, drives the full tier and streams the answer."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cascade.answer import Answer, Chunk, asked, check_prompt
from cascade.engine.grammar import Grammars
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest, Unavailable
from cascade.messages import Close, Failed, Message, Open, mint
from cascade.params import Handling, SamplingParams, Speculation, check_adapter
from cascade.settings.config import CascadeConfig
from cascade.v1 import serving_pb2 as pb
from deployments.admission.front import Call, Front
from deployments.admission.gate import Life
from deployments.admission.retry import RetryBudget, SessionFailed, heard, pause
from deployments.chat.assistant import LONG_PROMPT, Assistant
from deployments.grpc.context import metadata, remaining_s, told
from deployments.grpc.requests import (
    parse_handling,
    parse_input,
    parse_sampling,
    parse_speculation,
    refuse_unknown,
    response,
    whole,
)
from deployments.grpc.turns import ChatTurn
from deployments.http.api import Api
from deployments.links.downlink import Downlink
from deployments.links.replica_status import ReplicaStatus, ask
from deployments.links.tls import check
from deployments.servers import Door
from deployments.tier import lessor

log = logging.getLogger(__name__)

FULL_WINDOW = 256  # tokens the full tier may write that have not been handed to the client's stream
LEASE_TIMEOUT_S = 30.0  # a full replica may have to start first
HELD_PLACES = 16  # sessions that a full replica takes at least, for one to be held for nobody: fewer are too dear
DESCRIBE_TIMEOUT_S = 5.0
OBSERVE_TIMEOUT_S = 1.0
OBSERVE_S = 5.0  # for which figures of the tiers are good enough for the metrics
LOWER_START_S = 60.0  # how much later than the full tier the others may be ready; the router does without those that are not
DRAIN_MARGIN_S = 3.0  # of the time that Serve gives a replica to end, kept for closing


class Router:
    """Serves `cascade.v1.Cascade`; ``handles`` are those of all tiers, bottom to top."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Mapping[str, Any], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        self._config = CascadeConfig.model_validate(config)
        if self._config.link_tls is not None:
            check(self._config.link_tls)
        self._handles = handles
        self.front = Front(self._config)
        full = self._config.tiers[-1]
        engine = full.engine_kwargs
        source = full.model_loading_config.source
        self.tokenizer = await asyncio.to_thread(
            Tokenizer.from_pretrained, source, revision=engine.revision, trust_remote_code=engine.trust_remote_code
        )
        self._grammars = Grammars(self.tokenizer)
        tiers = await self._wait_for_tiers()
        self.max_model_len = min(self._config.max_model_len or 2**31, *(tier["context_len"] for tier in tiers))
        self.assistant = Assistant(self.tokenizer, self._config.router.tool_format, self.front, self.max_model_len, self.check)
        if len(self._handles) > 1:
            self.front.metrics.started(len(tiers) - 1)
        self._replica_status, self._observe_at = ReplicaStatus(), 0.0
        self._num_ids = min(tier["vocab_size"] for tier in tiers)
        self._inboxes: dict[str, asyncio.Queue[Message]] = {}
        self._downlink = self._joined()
        self._api = Api(self).application()
        listen = self._config.router.listen
        self._door = None if listen is None else Door(self, self._api, listen, self.front.limits)
        if self._door is not None:
            await self._door.open()

    def _joined(self) -> Downlink:
        """The links to the full tier."""
        full = self._config.tiers[-1]
        places = full.deployment_config.max_ongoing_requests
        return Downlink(
            {full.name: lessor(self._handles[full.name])},
            self._hear,
            lease_timeout_s=LEASE_TIMEOUT_S,
            spare_s=self._config.router.spare_lease_s if places >= HELD_PLACES else 0.0,
            tls=self._config.link_tls,
        )

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer, piece by piece."""
        with told(grpc_context, self.front.metrics.refused):
            async with contextlib.aclosing(self._asked(partial(self._admit, request), grpc_context)) as chunks:
                async for chunk in chunks:
                    yield response(chunk)

    async def Complete(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.CompleteResponse:
        """The whole answer."""
        with told(grpc_context, self.front.metrics.refused):
            if request.watch:
                raise InvalidRequest("watch is true: only streams tell of guesses, so ask for Generate")
            async with contextlib.aclosing(self._asked(partial(self._admit, request), grpc_context)) as chunks:
                return whole([chunk async for chunk in chunks])

    async def Chat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> AsyncIterator[pb.ChatResponse]:
        """The assistant's next turn, piece by piece."""
        with told(grpc_context, self.front.metrics.refused):
            talk = ChatTurn(request)
            async with contextlib.aclosing(self._asked(partial(self._admit_talk, talk), grpc_context)) as chunks:
                async for chunk in chunks:
                    yield talk.piece(chunk)

    async def CompleteChat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> pb.CompleteChatResponse:
        """The assistant's whole next turn."""
        with told(grpc_context, self.front.metrics.refused):
            if request.watch:
                raise InvalidRequest("watch is true: only streams tell of guesses, so ask for Chat")
            talk = ChatTurn(request)
            async with contextlib.aclosing(self._asked(partial(self._admit_talk, talk), grpc_context)) as chunks:
                return talk.whole([chunk async for chunk in chunks])

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:
        """End requests of the same key."""
        with told(grpc_context, self.front.metrics.refused):
            refuse_unknown(request, "the request")
            account = self.front.access.account(metadata(grpc_context).get("authorization"))
            return pb.AbortResponse(aborted=self.front.abort(account, request.request_id))

    async def Describe(self, request: pb.DescribeRequest, grpc_context: RayServegRPCContext) -> pb.DescribeResponse:
        """What is served, and how many replicas run."""
        with told(grpc_context, self.front.metrics.refused):
            self.front.access.account(metadata(grpc_context).get("authorization"))
            replicas = await self._replica_status.replicas()
            states = await asyncio.gather(*(ask(handle, DESCRIBE_TIMEOUT_S) for handle in self._handles.values()))
            response = pb.DescribeResponse(
                max_model_len=self.max_model_len, window=self._config.window, version=version("cascade-serve")
            )
            for tier, state in zip(self._config.tiers, states, strict=True):
                state = state or {"name": tier.name, "model": tier.model_loading_config.model_id}
                known = {name: state[name] for name in pb.Tier.DESCRIPTOR.fields_by_name if name in state}
                response.tiers.add(replicas=replicas.get(tier.name, 0), **known)
            return response

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP API, for Ray Serve's proxies."""
        return self._api

    async def observe(self) -> None:
        """Bring up to date what the metrics say of the tiers, if that is old.

        Tiers without a replica are not asked: Serve would start one for the question.
        """
        if time.monotonic() < self._observe_at:
            return
        self._observe_at = time.monotonic() + OBSERVE_S
        try:
            replicas = await self._replica_status.replicas()
        except Unavailable:  # as it was then
            return
        running = [name for name in self.names if replicas.get(name)]
        states = await asyncio.gather(*(ask(self._handles[name], OBSERVE_TIMEOUT_S) for name in running))
        said = dict(zip(running, states, strict=True))
        for name in self.names:
            self.front.metrics.tier(name, replicas.get(name, 0), said.get(name))

    async def drain(self) -> None:
        """Take no more requests, and let those that are there end."""
        if self._door is not None:
            await self._door.leave()
        timeout_s = max(0.0, self._config.router.deployment_config.graceful_shutdown_timeout_s - DRAIN_MARGIN_S)
        if not await self.front.gate.drained(timeout_s):
            log.warning("Requests that did not end within %g s are aborted", timeout_s)
            self.front.abort_all()

    async def __del__(self) -> None:
        await self.drain()
        if self._door is not None:
            await self._door.close()
        await self._downlink.close()

    @property
    def model(self) -> str:
        """Name of the model whose text clients get."""
        return self._config.tiers[-1].model_loading_config.model_id

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tiers, bottom to top."""
        return self._config.names

    async def _wait_for_tiers(self) -> list[dict[str, Any]]:
        """What the tiers say of themselves: the full one however long it takes to start, the others if they are ready soon."""
        *lower, full = self._handles.values()
        state = await full.describe.remote()
        return [state, *filter(None, await asyncio.gather(*(ask(handle, LOWER_START_S) for handle in lower)))]

    # requests

    async def _asked(self, admit: Callable[[], Awaitable[Open]], context: RayServegRPCContext) -> AsyncGenerator[Chunk, None]:
        """The answer to a gRPC request, which ``admit`` checks."""
        since, said = time.monotonic(), metadata(context)
        account = self.front.access.account(said.get("authorization"))
        self.front.gate.check()  # before the work of reading it
        opening = await admit()
        with self.front.call(account, said.get("request_id"), remaining_s(context), since=since) as call:
            async with contextlib.aclosing(self.chunks(opening, call)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def chunks(self, opening: Open, call: Call, index: int = 0) -> AsyncGenerator[Chunk, None]:
        """One answer, piece by piece; ``index`` is that of its prompt."""
        return self.front.counted(self._chunks(opening, call, index), opening, call)

    async def _chunks(self, opening: Open, call: Call, index: int) -> AsyncGenerator[Chunk, None]:
        """Drive the full tier until the answer is complete, on as many replicas as it takes."""
        answer = Answer(opening, self.tokenizer.decoder(opening.tokens), index, lambda: time.monotonic() - call.since)
        retry_budget = RetryBudget(self._config.router.stall_timeout_s)
        while not answer.finished:
            try:
                async with contextlib.aclosing(self._drive(answer, retry_budget, call.life)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except SessionFailed as failure:
                pause_s = retry_budget.failed(str(failure))
                log.info("A request goes on from token %d on another full replica: %s", answer.num_tokens, failure)
                await pause(pause_s, call.life)

    async def _drive(self, answer: Answer, retry_budget: RetryBudget, life: Life) -> AsyncGenerator[Chunk, None]:
        """Pieces from one session at the full tier, until the answer is complete; raises `SessionFailed`."""
        opening = answer.replay(self._downlink.session(self.names[-1]))
        inbox = self._inboxes[opening.session] = asyncio.Queue()
        self._downlink.put([opening])
        try:
            with life.waking(partial(inbox.put_nowait, Failed(opening.session, "aborted"))):
                while not answer.finished:
                    chunk, commit = answer.take(await heard(inbox, retry_budget, life))
                    if chunk is not None:
                        yield chunk
                    if commit is not None:
                        # acknowledged behind the yield: a client that does not read stalls the full tier at its window
                        self._downlink.put([commit])
                    retry_budget.saw(answer.num_tokens)
        finally:
            del self._inboxes[opening.session]
            self._downlink.put([Close(opening.session)])

    async def _admit(self, request: pb.GenerateRequest) -> Open:
        """Check everything a request says; raises `InvalidRequest`."""
        self.front.check_length(len(request.prompt))
        params = parse_sampling(request)
        await self.check(params)
        speculation = parse_speculation(request)
        handling = parse_handling(request)
        if len(request.prompt) < LONG_PROMPT:
            ids = parse_input(request, self.tokenizer)
        else:
            ids = await asyncio.to_thread(parse_input, request, self.tokenizer)
        return self.opening(ids, params, speculation, handling)

    async def _admit_talk(self, talk: ChatTurn) -> Open:
        """The same for a conversation."""
        task = await talk.task(self.assistant)
        await self.check(task.params)
        return self.opening(task.ids, task.params, parse_speculation(talk.request), parse_handling(talk.request))

    async def check(self, params: SamplingParams) -> None:
        """Raise `InvalidRequest` if the tiers cannot honour a parameter."""
        most = self.front.limits.max_tokens
        if most is not None and params.max_tokens > most:
            raise InvalidRequest(f"max_tokens is {params.max_tokens}: this server writes at most {most}")
        params.check_vocabulary(self._num_ids)
        check_adapter(params.adapter, self._config.tiers[-1].engine_kwargs.lora_modules)
        if params.structured is not None:
            await asyncio.to_thread(self._grammars.check, params.structured)

    def opening(
        self, ids: Sequence[int], params: SamplingParams, speculation: Speculation, handling: Handling = Handling()
    ) -> Open:
        """What the full tier is asked, with parameters that were checked; raises `InvalidRequest`."""
        problem = check_prompt(ids, params.max_tokens, self._num_ids, self.max_model_len)
        if problem:
            raise InvalidRequest(problem)
        return asked(
            mint(),
            ids,
            params,
            speculation,
            handling,
            names=self.names,
            end_ids=self.tokenizer.end_ids,
            ahead=FULL_WINDOW,
            window=self._config.window,
        )

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            inbox = self._inboxes.get(message.session)
            if inbox is not None:
                inbox.put_nowait(message)
