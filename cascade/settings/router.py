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

    max_running: Annotated[int, Field(ge=1)] | None = None  # answers at once
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None  # of prompts and answers
    # lowest, which is served soonest, that a request may ask for; not given: 0, and any on a server without keys
    min_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0  # share of the tokens, beside those of others, where requests wait


class AccessConfig(Section):
    """Who may ask. Keys stand in a file or an environment variable of the router, one NAME=KEY a line; never in here."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None
    keys_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "CASCADE_API_KEYS"  # open to all if neither is set
    limits: dict[str, KeyLimits] = Field(default_factory=dict)  # by the name of the key
    default_limits: KeyLimits = KeyLimits()  # of keys that are not named there
    log: bool = True  # one line for each request that is over, without its words


class RequestLimits(Section):
    """How much one request may ask for."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20  # of an HTTP body or a gRPC message
    max_prompt_chars: Annotated[int, Field(ge=1)] = 4_000_000
    max_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] = 64  # in one HTTP request
    max_n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 16  # answers for each prompt
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # output tokens of each answer; the models' context if not given
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # to send a request's head and body
    read_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # a client that takes nothing for so long is dropped


class DoorTLS(Section):
    """TLS towards clients. Paths of PEM files where the router runs."""

    certificate: Annotated[str, Field(min_length=1)]  # and the chain after it, for the name or address that clients use
    key: Annotated[str, Field(min_length=1)]


class ListenConfig(Section):
    """Servers in the router's own process, instead of Ray Serve's proxies."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    grpc_port: Annotated[int, Field(ge=1, le=65535)] = 9000
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    tls: DoorTLS | None = None  # both doors; plain unless given

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.http_port:
            raise ValueError(f"port {self.http_port} is named for HTTP and for gRPC: give each a port of its own")
        return self


class AuditConfig(Section):
    """Which answers the full tier alone writes again when nothing else is to be done, see docs/audit.md."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.0  # of all answers
    max_waiting: Annotated[int, Field(ge=1)] = 16  # answers that wait for an audit; more are skipped
    max_wait_s: Annotated[float, Field(gt=0)] = 60.0  # an answer whose audit does not get on for so long is skipped


def _listed(value: Any) -> Any:
    """A name need not be a list of one."""
    return (value,) if isinstance(value, str) else value


class RouterConfig(Section):
    """The ingress: gRPC and HTTP."""

    # of the full model, for clients: answers have the first one; its model_id unless given
    served_model_name: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)] = ()

    deployment_config: RouterDeploymentConfig = RouterDeploymentConfig()
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # a request without progress for so long is given up
    max_running: Annotated[int, Field(ge=1)] = 256  # answers that one router writes at once
    max_waiting: Annotated[int, Field(ge=0)] = 256  # that wait for their turn; more are refused
    held_lease_s: Annotated[float, Field(ge=0, le=8)] = 5.0  # how long a full replica is held for the next request; 0: never
    prefix_affinity: bool = True  # requests that begin alike meet the same full replica, while it is not busier than others
    tool_format: Literal["hermes", "mistral", "mistral11", "llama3", "json"] | None = (
        None  # of calls; what the chat template writes
    )
    listen: ListenConfig | None = None  # Ray Serve's proxies alone unless given; `cascade serve` gives it
    access: AccessConfig = AccessConfig()
    limits: RequestLimits = RequestLimits()
    audit: AuditConfig = AuditConfig()
