from cascade.v1 import serving_pb2 as _serving_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Batch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("session", "open", "commit", "close", "proposal", "failed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    session: str
    open: Open
    commit: Commit
    close: Close
    proposal: Proposal
    failed: Failed
    def __init__(self, session: _Optional[str] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("tokens", "prompt_len", "sampling", "ends", "tier", "chain", "window", "draft_window", "priority", "cache_salt", "adaptive", "branches", "draft_branches", "drafters", "traceparent", "tracestate", "lease", "in_turns")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    IN_TURNS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    sampling: _serving_pb2.Sampling
    ends: _containers.RepeatedScalarFieldContainer[int]
    tier: str
    chain: _containers.RepeatedScalarFieldContainer[str]
    window: int
    draft_window: int
    priority: int
    cache_salt: str
    adaptive: bool
    branches: int
    draft_branches: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    traceparent: str
    tracestate: str
    lease: str
    in_turns: bool
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[_serving_pb2.Sampling, _Mapping]] = ..., ends: _Optional[_Iterable[int]] = ..., tier: _Optional[str] = ..., chain: _Optional[_Iterable[str]] = ..., window: _Optional[int] = ..., draft_window: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adaptive: _Optional[bool] = ..., branches: _Optional[int] = ..., draft_branches: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., lease: _Optional[str] = ..., in_turns: _Optional[bool] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("start", "tokens", "least_chance", "most")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEAST_CHANCE_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    least_chance: float
    most: int
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., least_chance: _Optional[float] = ..., most: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("keep",)
    KEEP_FIELD_NUMBER: _ClassVar[int]
    keep: bool
    def __init__(self, keep: _Optional[bool] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("start", "tokens", "origins", "edges", "logprobs", "skip_reason", "prompt_logprobs", "confidences", "parents", "cached", "rests")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RESTS_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    origins: bytes
    edges: _containers.RepeatedCompositeFieldContainer[_serving_pb2.Edge]
    logprobs: _containers.RepeatedCompositeFieldContainer[LinkLogprobs]
    skip_reason: str
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[LinkLogprobs]
    confidences: bytes
    parents: _containers.RepeatedScalarFieldContainer[int]
    cached: int
    rests: bool
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., origins: _Optional[bytes] = ..., edges: _Optional[_Iterable[_Union[_serving_pb2.Edge, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[LinkLogprobs, _Mapping]]] = ..., skip_reason: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[_Union[LinkLogprobs, _Mapping]]] = ..., confidences: _Optional[bytes] = ..., parents: _Optional[_Iterable[int]] = ..., cached: _Optional[int] = ..., rests: _Optional[bool] = ...) -> None: ...

class LinkLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "tier", "fault")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    tier: str
    fault: bool
    def __init__(self, reason: _Optional[str] = ..., tier: _Optional[str] = ..., fault: _Optional[bool] = ...) -> None: ...
