"""The ingress: who may ask, for how much, and where."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from cascade.params import MAX_PRIORITY
from cascade.settings.deployment import RouterDeploymentConfig
from cascade.settings.section import Section

MAX_PROMPTS = 4096  # of one request, whatever a server's limits
MAX_ANSWERS = 1024  # for each prompt


class KeyLimits(Section):
    """What the requests of one API key may take together."""

    max_running: Annotated[int, Field(ge=1)] | None = None  # answers at once; any number by default
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None  # tokens of prompts and answers; any number by default
    # lowest priority, which is served soonest, that a request may ask for; 0 by default, any on a server without keys
    min_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    train: bool = True  # drafters may learn from its answers, where `alignment` lets them
    # share of the tokens beside those of other keys, while requests wait
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0


class AccessConfig(Section):
    """Who may ask. Keys stand in a file or an environment variable of the router, one NAME=KEY a line; never in here."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None  # file of NAME=KEY lines; read again when it changes
    # environment variable of keys; without keys anybody may ask
    keys_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "CASCADE_API_KEYS"
    required: bool = False  # refuse to start a router without keys; also set if the process that starts the server has keys
    open_metrics: bool = False  # answer GET /metrics without a key
    limits: dict[str, KeyLimits] = Field(default_factory=dict)  # limits of single keys, by name
    default_limits: KeyLimits = KeyLimits()  # limits of keys that `limits` does not name
    log: bool = True  # log one line for each finished request, without its words


class RequestLimits(Section):
    """How much one request may ask for."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20  # bytes of an HTTP body or a gRPC message
    max_prompt_chars: Annotated[int, Field(ge=1)] = 4_000_000  # characters of a prompt or a conversation
    max_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] = 64  # prompts in one HTTP request
    max_n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 16  # answers for each prompt
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # output tokens of an answer; by default what the context leaves
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # seconds that a client has to send a request
    read_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # seconds after which a client that reads nothing is dropped


class DoorTLS(Section):
    """TLS towards clients. Paths of PEM files where the router runs."""

    certificate: Annotated[str, Field(min_length=1)]  # certificate and its chain, for the name or address that clients use
    key: Annotated[str, Field(min_length=1)]  # private key of the certificate


class ListenConfig(Section):
    """Servers in the router's own process, instead of Ray Serve's proxies."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"  # address to listen at; 0.0.0.0 is every one
    grpc_port: Annotated[int, Field(ge=1, le=65535)] = 9000  # port of gRPC
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000  # port of HTTP
    tls: DoorTLS | None = None  # TLS on both ports; plain by default

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.http_port:
            raise ValueError(f"port {self.http_port} is named for HTTP and for gRPC: give each a port of its own")
        return self


class AuditConfig(Section):
    """Which answers the full tier alone writes again when nothing else is to be done."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of all answers; 0: none
    max_waiting: Annotated[int, Field(ge=1)] = 16  # answers that wait for an audit at one router; more are skipped
    max_wait_s: Annotated[float, Field(gt=0)] = 60.0  # seconds after which an audit without progress is given up


def _listed(value: Any) -> Any:
    """A name need not be a list of one."""
    return (value,) if isinstance(value, str) else value


class RouterConfig(Section):
    """The ingress: gRPC and HTTP."""

    # names of the full model for clients, of which answers have the first; its `model_id` by default
    served_model_name: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)] = ()

    deployment_config: RouterDeploymentConfig = RouterDeploymentConfig()  # replicas of the router
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # seconds after which a request without progress is given up
    max_running: Annotated[int, Field(ge=1)] = 256  # answers that one router writes at once
    max_waiting: Annotated[int, Field(ge=0)] = 256  # answers that wait for their turn; more are refused
    # seconds for which a full replica is held for the next request; 0: never
    held_lease_s: Annotated[float, Field(ge=0, le=8)] = 5.0
    prefix_affinity: bool = True  # send requests that begin alike to one full replica while it is not busier
    # how the model writes calls; found in its chat template by default
    tool_format: Literal["hermes", "mistral", "mistral11", "llama3", "json"] | None = None
    # ports of the router's own; by default Ray Serve's proxies alone, and with `cascade serve` these
    listen: ListenConfig | None = None
    access: AccessConfig = AccessConfig()  # keys and their limits
    limits: RequestLimits = RequestLimits()  # how much one request may ask for
    audit: AuditConfig = AuditConfig()  # answers that the full tier writes again
