"""The ingress: who may ask, for how much, and where."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from cascade.params import MAX_PRIORITY
from cascade.settings.deployment import RouterDeploymentConfig
from cascade.settings.section import Count, Port, Seconds, Section, Text, Variable

MAX_PROMPTS = 4096  # prompts of one request; `limits` may lower both
MAX_ANSWERS = 1024  # answers for each prompt


class KeyLimits(Section):
    """What the requests of one API key may take together at one router."""

    max_running: Count | None = None  # answers at once; by default any number
    tokens_per_minute: Count | None = None  # tokens of prompts and answers; by default any number
    # lowest (soonest) `priority` allowed; by default 0, any on a server without keys
    min_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    train: bool = True  # drafters may learn from its answers
    # share of the tokens while requests wait
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0


class AccessConfig(Section):
    """Who may ask. Keys stand in a file or an environment variable of the router, one NAME=KEY a line; never in here."""

    keys_file: Text | None = None  # file of NAME=KEY lines; read again when it changes
    # environment variable of keys
    keys_env: Variable = "CASCADE_API_KEYS"
    required: bool = False  # refuse to start without keys; also set if the process that starts the server has keys
    open_metrics: bool = False  # answer GET /metrics without a key
    # origins, such as https://chat.example, whose pages may send requests; "*" is every one
    allowed_origins: tuple[Text, ...] = ()
    limits: dict[str, KeyLimits] = Field(default_factory=dict)  # limits of single keys, by name
    default_limits: KeyLimits = KeyLimits()  # limits of keys that `limits` does not name


class RequestLimits(Section):
    """How much one request may ask for."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20  # bytes of an HTTP body or a gRPC message
    max_prompt_chars: Count = 4_000_000  # characters of a prompt or a conversation
    max_prompts: Annotated[Count, Field(le=MAX_PROMPTS)] = 64  # prompts in one HTTP request
    max_n: Annotated[Count, Field(le=MAX_ANSWERS)] = 16  # answers for each prompt
    max_tokens: Count | None = None  # output tokens of an answer; by default what the context leaves
    body_timeout_s: Seconds = 30.0  # seconds to send a request
    read_timeout_s: Seconds = 60.0  # seconds until a client that reads nothing is dropped


class ListenTLS(Section):
    """TLS towards clients. Paths of PEM files where the router runs."""

    certificate: Text  # certificate and its chain
    key: Text  # private key of the certificate


class ListenConfig(Section):
    """Servers in the router's own process, instead of Ray Serve's proxies."""

    host: Text = "127.0.0.1"  # address to listen at; 0.0.0.0 is every one
    grpc_port: Port = 9000  # port of gRPC
    http_port: Port = 8000  # port of HTTP
    tls: ListenTLS | None = None  # TLS on both ports; plain by default

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.http_port:
            raise ValueError(f"port {self.http_port} is named for HTTP and for gRPC: give each a port of its own")
        return self


def _listed(value: Any) -> Any:
    """A name need not be a list of one."""
    return (value,) if isinstance(value, str) else value


class RouterConfig(Section):
    """The ingress: gRPC and HTTP."""

    # names of the full model for clients; by default its `model_id`
    served_model_name: Annotated[tuple[Text, ...], BeforeValidator(_listed)] = ()

    deployment_config: RouterDeploymentConfig = RouterDeploymentConfig()  # replicas of the router
    # seconds until a request without progress fails: longer than a full replica takes to start anew
    stall_timeout_s: Seconds = 600.0
    max_running: Count = 256  # answers at once, of one router
    max_waiting: Annotated[int, Field(ge=0)] = 256  # answers that wait; more are refused
    # seconds for which a lease is held for the next request
    held_lease_s: Annotated[float, Field(ge=0, le=8)] = 5.0
    prefix_affinity: bool = True  # send requests that begin alike to one full replica
    # how the model writes calls; by default found in its chat template
    tool_format: Literal["hermes", "mistral", "mistral11", "llama3", "json"] | None = None
    # ports of the router's own; by default only with `cascade serve`
    listen: ListenConfig | None = None
    access: AccessConfig = AccessConfig()  # keys and their limits
    limits: RequestLimits = RequestLimits()  # how much one request may ask for
