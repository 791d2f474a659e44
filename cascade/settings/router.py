"""The ingress: who may send requests, how large these may be, and where the router listens."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from cascade.params import MAX_PRIORITY
from cascade.settings.deployment import RouterDeploymentConfig
from cascade.settings.section import NUMERIC, Count, Port, Seconds, Section, Text, Variable

MAX_PROMPTS = 4096  # prompts of one request; `limits` may lower this and the next one
MAX_ANSWERS = 1024  # answers for each prompt


class KeyLimits(Section):
    """Limits of all requests of one API key together, at one router."""

    max_running: Count | None = None  # answers at the same time; by default any number
    tokens_per_minute: Count | None = None  # tokens of prompts and answers; by default any number
    # lowest (soonest) `priority` allowed; by default 0, on a server without keys any
    min_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), NUMERIC] | None = None
    train: bool = True  # drafters may learn from its answers
    # share of the tokens, relative to other keys, while requests wait
    weight: Annotated[float, Field(ge=0.01, le=1000), NUMERIC] = 1.0


class AccessConfig(Section):
    """Who may send requests. Keys are never in here: they are in a file or an environment variable, one NAME=KEY a line."""

    keys_file: Text | None = None  # file of NAME=KEY lines; reread when it changes
    # environment variable with keys, separated by commas
    keys_env: Variable = "CASCADE_API_KEYS"
    required: bool = False  # refuse to start without keys; also on if the process that starts the server has keys
    open_metrics: bool = False  # answer GET /metrics without a key
    # origins, such as https://chat.example, whose pages may send requests; "*" for all
    allowed_origins: tuple[Text, ...] = ()
    limits: dict[str, KeyLimits] = Field(default_factory=dict)  # limits of single keys, by the key's name
    default_limits: KeyLimits = KeyLimits()  # limits of keys that `limits` does not name


class RequestLimits(Section):
    """Limits of one request."""

    max_body_bytes: Annotated[int, Field(ge=1024), NUMERIC] = 16 * 2**20  # bytes of an HTTP body or a gRPC message
    max_prompt_chars: Count = 4_000_000  # characters of a prompt or a conversation
    max_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS), NUMERIC] = 64  # prompts of one HTTP request
    max_n: Annotated[int, Field(ge=1, le=MAX_ANSWERS), NUMERIC] = 16  # answers for each prompt
    max_tokens: Count | None = None  # output tokens of an answer; by default what the context leaves
    body_timeout_s: Seconds = 30.0  # seconds that a client has to send a request
    read_timeout_s: Seconds = 60.0  # seconds until a client that reads nothing is dropped


class ListenTLS(Section):
    """TLS towards clients. Paths of PEM files where the router runs."""

    certificate: Text  # certificate and its chain
    key: Text  # private key of the certificate


class ListenConfig(Section):
    """Servers in the router's own process, instead of Ray Serve's proxies."""

    host: Text = "127.0.0.1"  # address to listen on; 0.0.0.0 for all
    grpc_port: Port = 9000  # port of gRPC
    http_port: Port = 8000  # port of HTTP
    tls: ListenTLS | None = None  # TLS on both ports; plain by default

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.http_port:
            raise ValueError(f"port {self.http_port} is named for HTTP and for gRPC: give each a port of its own")
        return self


def _listed(value: Any) -> Any:
    """A list of names; a single name needs no list."""
    return (value,) if isinstance(value, str) else value


class RouterConfig(Section):
    """The ingress: gRPC and HTTP."""

    # names of the full model for clients; by default its `model_id`
    served_model_name: Annotated[tuple[Text, ...], BeforeValidator(_listed)] = ()

    deployment_config: RouterDeploymentConfig = RouterDeploymentConfig()  # replicas of the router
    # seconds without progress after which a request fails; should exceed the time that a full replica takes to start
    stall_timeout_s: Seconds = 600.0
    max_running: Count = 256  # answers of one router at the same time
    max_waiting: Annotated[int, Field(ge=0), NUMERIC] = 256  # answers that may wait; more are refused
    # seconds for which a lease may be reused by further requests
    held_lease_s: Annotated[float, Field(ge=0, le=8), NUMERIC] = 5.0
    prefix_affinity: bool = True  # send requests that begin alike to the same full replica
    # how the model writes tool calls; by default learned from its chat template
    tool_format: Literal["hermes", "mistral", "mistral11", "llama3", "json"] | None = None
    # own ports of the router; by default only with `cascade serve`
    listen: ListenConfig | None = None
    access: AccessConfig = AccessConfig()  # keys and their limits
    limits: RequestLimits = RequestLimits()  # how much one request may ask for
