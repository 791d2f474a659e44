from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "token_ids", "sampling", "speculation", "priority", "cache_salt", "resume", "train")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: TokenIds
    sampling: Sampling
    speculation: Speculation
    priority: int
    cache_salt: str
    resume: Resume
    train: bool
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., train: _Optional[bool] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "logprobs", "structured", "prompt_logprobs", "adapter")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    logprobs: int
    structured: Structured
    prompt_logprobs: int
    adapter: str
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., structured: _Optional[_Union[Structured, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class Structured(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choice
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("mode", "tiers", "window", "branches")
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    mode: str
    tiers: _containers.RepeatedScalarFieldContainer[str]
    window: int
    branches: int
    def __init__(self, mode: _Optional[str] = ..., tiers: _Optional[_Iterable[str]] = ..., window: _Optional[int] = ..., branches: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "tokens", "finish", "prompt", "seed")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish: Finish
    prompt: _containers.RepeatedCompositeFieldContainer[PromptToken]
    seed: int
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ..., seed: _Optional[int] = ...) -> None: ...

class PromptToken(_message.Message):
    __slots__ = ("id", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopToken]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "level", "end", "logprob", "top", "replaced")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    id: int
    level: int
    end: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopToken]
    replaced: int
    def __init__(self, id: _Optional[int] = ..., level: _Optional[int] = ..., end: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ..., replaced: _Optional[int] = ...) -> None: ...

class TopToken(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "seed", "prompt_tokens", "completion_tokens", "edges", "first_token_s", "undrafted", "reasoning_tokens", "cached_tokens", "stop_string")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    reason: str
    seed: int
    prompt_tokens: int
    completion_tokens: int
    edges: _containers.RepeatedCompositeFieldContainer[Edge]
    first_token_s: float
    undrafted: str
    reasoning_tokens: int
    cached_tokens: int
    stop_string: str
    def __init__(self, reason: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., edges: _Optional[_Iterable[_Union[Edge, _Mapping]]] = ..., first_token_s: _Optional[float] = ..., undrafted: _Optional[str] = ..., reasoning_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., stop_string: _Optional[str] = ...) -> None: ...

class Edge(_message.Message):
    __slots__ = ("drafter", "verifier", "passes", "proposed", "accepted", "emitted", "mean_accepted_len", "waited_s", "accepted_by_position", "proposed_by_position", "accepted_by_rank", "proposed_by_rank", "corrected", "prefetched", "prefetched_tokens", "undrafted_passes", "agreed")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTED_LEN_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_RANK_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_BY_RANK_FIELD_NUMBER: _ClassVar[int]
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_PASSES_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    verifier: str
    passes: int
    proposed: int
    accepted: int
    emitted: int
    mean_accepted_len: float
    waited_s: float
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    proposed_by_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_rank: _containers.RepeatedScalarFieldContainer[int]
    proposed_by_rank: _containers.RepeatedScalarFieldContainer[int]
    corrected: int
    prefetched: int
    prefetched_tokens: int
    undrafted_passes: int
    agreed: int
    def __init__(self, drafter: _Optional[str] = ..., verifier: _Optional[str] = ..., passes: _Optional[int] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., emitted: _Optional[int] = ..., mean_accepted_len: _Optional[float] = ..., waited_s: _Optional[float] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., proposed_by_position: _Optional[_Iterable[int]] = ..., accepted_by_rank: _Optional[_Iterable[int]] = ..., proposed_by_rank: _Optional[_Iterable[int]] = ..., corrected: _Optional[int] = ..., prefetched: _Optional[int] = ..., prefetched_tokens: _Optional[int] = ..., undrafted_passes: _Optional[int] = ..., agreed: _Optional[int] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("text", "tokens", "finish", "prompt")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish: Finish
    prompt: _containers.RepeatedCompositeFieldContainer[PromptToken]
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("messages", "sampling", "speculation", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "priority", "cache_salt", "include_reasoning", "separate_reasoning", "resume", "train")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_REASONING_FIELD_NUMBER: _ClassVar[int]
    SEPARATE_REASONING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    sampling: Sampling
    speculation: Speculation
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    chat_template_kwargs: str
    add_generation_prompt: bool
    continue_final_message: bool
    priority: int
    cache_salt: str
    include_reasoning: bool
    separate_reasoning: bool
    resume: Resume
    train: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: _Optional[bool] = ..., chat_template_kwargs: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., include_reasoning: _Optional[bool] = ..., separate_reasoning: _Optional[bool] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., train: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "function", "index")
    ID_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    id: str
    function: CalledFunction
    index: int
    def __init__(self, id: _Optional[str] = ..., function: _Optional[_Union[CalledFunction, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class CalledFunction(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("function",)
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    function: Function
    def __init__(self, function: _Optional[_Union[Function, _Mapping]] = ...) -> None: ...

class Function(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "function")
    MODE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    mode: str
    function: str
    def __init__(self, mode: _Optional[str] = ..., function: _Optional[str] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("content", "tool_calls", "tokens", "finish", "prompt", "text", "reasoning_content", "seed")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish: Finish
    prompt: _containers.RepeatedCompositeFieldContainer[PromptToken]
    text: str
    reasoning_content: str
    seed: int
    def __init__(self, content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ..., text: _Optional[str] = ..., reasoning_content: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class CompleteChatResponse(_message.Message):
    __slots__ = ("message", "tokens", "finish", "prompt", "text")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    message: ChatMessage
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish: Finish
    prompt: _containers.RepeatedCompositeFieldContainer[PromptToken]
    text: str
    def __init__(self, message: _Optional[_Union[ChatMessage, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt: _Optional[_Iterable[_Union[PromptToken, _Mapping]]] = ..., text: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("tiers", "max_model_len", "window", "version", "drafters", "branches", "defaults", "key")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    max_model_len: int
    window: int
    version: str
    drafters: _containers.RepeatedScalarFieldContainer[str]
    branches: int
    defaults: Sampling
    key: KeyLimits
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., max_model_len: _Optional[int] = ..., window: _Optional[int] = ..., version: _Optional[str] = ..., drafters: _Optional[_Iterable[str]] = ..., branches: _Optional[int] = ..., defaults: _Optional[_Union[Sampling, _Mapping]] = ..., key: _Optional[_Union[KeyLimits, _Mapping]] = ...) -> None: ...

class KeyLimits(_message.Message):
    __slots__ = ("name", "min_priority", "weight", "max_running", "tokens_per_minute", "train")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    min_priority: int
    weight: float
    max_running: int
    tokens_per_minute: int
    train: bool
    def __init__(self, name: _Optional[str] = ..., min_priority: _Optional[int] = ..., weight: _Optional[float] = ..., max_running: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., train: _Optional[bool] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "model", "replicas", "sessions", "context_len", "vocab_size", "parameters", "device", "dtype", "same_bits", "engine", "pass_cost", "context_s", "worth")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SAME_BITS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PASS_COST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    WORTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    replicas: int
    sessions: int
    context_len: int
    vocab_size: int
    parameters: int
    device: str
    dtype: str
    same_bits: bool
    engine: str
    pass_cost: _containers.RepeatedCompositeFieldContainer[PassPoint]
    context_s: float
    worth: _containers.RepeatedCompositeFieldContainer[Worth]
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., replicas: _Optional[int] = ..., sessions: _Optional[int] = ..., context_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., parameters: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., same_bits: _Optional[bool] = ..., engine: _Optional[str] = ..., pass_cost: _Optional[_Iterable[_Union[PassPoint, _Mapping]]] = ..., context_s: _Optional[float] = ..., worth: _Optional[_Iterable[_Union[Worth, _Mapping]]] = ...) -> None: ...

class Worth(_message.Message):
    __slots__ = ("drafter", "sampled", "num_sessions", "factor")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    sampled: bool
    num_sessions: int
    factor: float
    def __init__(self, drafter: _Optional[str] = ..., sampled: _Optional[bool] = ..., num_sessions: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...

class PassPoint(_message.Message):
    __slots__ = ("tokens", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    seconds: float
    def __init__(self, tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
