"""The gRPC API of one router: the methods of `cascade.v1.Cascade`."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from importlib.metadata import version

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from cascade.answer import Chunk
from cascade.errors import InvalidRequest
from cascade.params import MOST_BRANCHES, SamplingParams
from cascade.settings.config import CascadeConfig
from cascade.v1 import serving_pb2 as pb
from deployments.full_tier import FullTier
from deployments.gateway.admission.admission import Admission, Caller, metadata, refusal
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.grpc.requests import TextCall, TurnCall, refuse_unknown
from deployments.gateway.model import ServedModel
from deployments.links.replica_status import Siblings, Tiers

DESCRIBE_TIMEOUT_S = 2.0


class GrpcApi:
    """The methods, which Ray Serve or the router's own server calls by their names in the protocol; a router has the rest."""

    model: ServedModel
    assistant: Assistant
    admission: Admission
    _config: CascadeConfig
    _full: FullTier
    _tiers: Tiers
    _siblings: Siblings

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer, piece by piece."""
        call = TextCall(request, self.model)
        async with self._answering(call, grpc_context) as chunks:
            async for chunk in chunks:
                yield call.piece(chunk)

    async def Complete(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.CompleteResponse:
        """The whole answer."""
        call = TextCall(request, self.model)
        async with self._answering(call, grpc_context, "Generate") as chunks:
            return call.whole([chunk async for chunk in chunks])

    async def Chat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> AsyncIterator[pb.ChatResponse]:
        """The assistant's next turn, piece by piece."""
        call = TurnCall(request, self.assistant)
        async with self._answering(call, grpc_context) as chunks:
            async for chunk in chunks:
                yield call.piece(chunk)

    async def CompleteChat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> pb.CompleteChatResponse:
        """The assistant's whole next turn."""
        call = TurnCall(request, self.assistant)
        async with self._answering(call, grpc_context, "Chat") as chunks:
            return call.whole([chunk async for chunk in chunks])

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:
        """Abort requests of the same key at all routers."""
        with self._reporting(grpc_context) as caller:
            refuse_unknown(request)
            here = self.admission.abort(caller.account.name, request.request_id)
            elsewhere = await self._siblings.ask("abort_for", caller.account.name, request.request_id)
            return pb.AbortResponse(aborted=here + sum(elsewhere))

    async def abort_for(self, router: str, key: str, request_id: str) -> int | None:
        return None if router == self._siblings.name else self.admission.abort(key, request_id)

    async def Describe(self, request: pb.DescribeRequest, grpc_context: RayServegRPCContext) -> pb.DescribeResponse:
        """Describe the models, the tiers and their running replicas."""
        with self._reporting(grpc_context) as caller:
            states = await self._tiers.states(DESCRIBE_TIMEOUT_S)
            limits = caller.account.limits.model_dump(exclude_none=True)
            response = pb.DescribeResponse(
                max_model_len=self.model.context_len,
                window=self._config.window,
                version=version("cascade-serve"),
                drafters=self._config.drafters,
                branches=MOST_BRANCHES,
                defaults=pb.Sampling(**self.model.defaults_for(0, SamplingParams().max_tokens)),
                key=pb.KeyLimits(name=caller.account.name, **limits),
            )
            for tier in self._config.tiers:
                replicas, described = states[tier.name]
                state = described or {"name": tier.name, "model": tier.model_loading_config.model_id}
                fields = {name: state[name] for name in pb.Tier.DESCRIPTOR.fields_by_name if name in state}
                response.tiers.add(replicas=replicas, **fields)
            return response

    @contextlib.asynccontextmanager
    async def _answering(
        self, call: TextCall | TurnCall, context: RayServegRPCContext, streaming: str | None = None
    ) -> AsyncIterator[AsyncGenerator[Chunk, None]]:
        """The pieces of the answer to a call; ``streaming`` is the RPC for streams, if this one gives whole answers."""
        with self._reporting(context) as caller:
            resumes = call.request.HasField("resume")
            if streaming is not None and resumes:
                raise InvalidRequest(f"resume is set: only streams can be resumed, so call {streaming}")
            self.admission.places.check()  # before the request is parsed
            task = await call.task()
            if call.inert:
                context.set_trailing_metadata((("warning", f"No effect here: {', '.join(call.inert)}"),))
            spec = await self.model.admit(task)
            if resumes:
                call.resume(*await self.model.delivered([spec]))
            with self.admission.admitted(caller, [spec], train=task.handling.train) as request:
                async with contextlib.aclosing(self._full.pieces(spec, request)) as chunks:
                    yield chunks

    @contextlib.contextmanager
    def _reporting(self, context: RayServegRPCContext) -> Iterator[Caller]:
        """Give a call that fails inside the context its gRPC status and message; raises `Unauthenticated`."""
        since, pairs = time.monotonic(), [*(context.invocation_metadata() or ())]
        headers = {name: value for name, value in reversed(pairs) if isinstance(value, str)}  # the first of repeated ones
        account = None
        try:
            account = self.admission.access.account(headers.get("authorization"))
            # Ray Serve's proxies do not pass the deadline on; they cancel the call when it passes
            left_s = getattr(context, "time_remaining", lambda: None)()
            yield Caller(account, headers.get("request_id"), since, pairs, left_s)
        except Exception as error:
            refused = refusal(error)
            self.admission.refused(refused, headers.get("request_id"), account)
            context.set_code(grpc.StatusCode[refused.grpc])
            context.set_details(str(refused))
            context.set_trailing_metadata(metadata(refused))
            raise
