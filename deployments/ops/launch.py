"""Starts a server on this machine, or on the Ray cluster in ``RAY_ADDRESS``, for `cascade serve`."""

import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import ray
import ray.util
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException

from cascade.client.connection import SECURE
from cascade.errors import ConfigError, ModelError, reason
from cascade.settings.config import CascadeConfig
from cascade.settings.llm_configs import load_config
from cascade.settings.router import ListenConfig
from cascade.settings.section import sentence
from deployments.app import bind, parse, shortage, verified
from deployments.gateway.admission.access import Access
from deployments.links.tls import check

log = logging.getLogger(__name__)

APPLICATION = "cascade"
LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)  # above the ports of Ray's workers
CONNECT_S = 10.0
QUIET = {"enable_access_log": False}  # otherwise there is a line for each lease
LOGICAL_CPUS = 16  # CPUs of a Ray that is started here, since tiers share the cores of one machine freely


class Server:
    """A running cascade. ``address`` is for gRPC clients, ``url`` for HTTP; ``tiers`` are names, bottom to top."""

    def __init__(self, config: CascadeConfig, listen: ListenConfig, owns_ray: bool, name: str = APPLICATION) -> None:
        self.config = config
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(listen.host, f"[{listen.host}]" if ":" in listen.host else listen.host)
        self.address = f"{SECURE if listen.tls else ''}{host}:{listen.grpc_port}"
        self.url = f"{'https' if listen.tls else 'http'}://{host}:{listen.http_port}"
        self.tiers = config.names
        self.model = config.model_names[0]
        self._listen = listen
        self._owns_ray = owns_ray
        self._name = name
        self._deployed = False

    @classmethod
    def start(
        cls,
        config: CascadeConfig | Mapping[str, Any] | Path | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        grpc_port: int | None = None,
        name: str = APPLICATION,
        num_gpus: int | None = None,
        tell: Callable[[str], object] = lambda phase: None,
    ) -> Self:
        """Start a server, and return when all tiers are ready. A port of 0 takes any free one.

        ``port`` is for HTTP; if it is 0, ``grpc_port`` is 0 by default. Listens on the address in ``host`` or in the
        configuration's ``router.listen``, by default on loopback. Joins the Ray cluster in ``RAY_ADDRESS``, or starts Ray on
        this machine, with ``num_gpus`` GPUs, by default all. ``name`` is the application's, unique on the cluster. ``tell`` is
        called with each step.

        Raises `ConfigError`, or `ModelError` if a tier does not come up.
        """
        parsed = load_config(config) if isinstance(config, Path) else parse(config)
        listen = listening(parsed.router.listen or ListenConfig(), host, port, grpc_port)
        server = cls(listening_at(parsed, listen), listen, not (ray.is_initialized() or _cluster()), name)
        try:
            server._start(tell, num_gpus)
        except RuntimeError as error:  # a replica did not start; the message has its traceback
            cause = _cause(error, name)
            server.stop()
            raise ModelError(f"The tiers did not start: {cause}") from error
        except BaseException:
            server.stop()
            raise
        return server

    def _start(self, tell: Callable[[str], object], num_gpus: int | None) -> None:
        config = self.config
        Access(config.router.access)  # raises `ConfigError` if keys cannot be used, as the next lines do for certificates
        for tls in (config.link_tls, self._listen.tls):
            if tls is not None:
                check(tls)
        tell("Starting Ray, reading configurations")
        with ThreadPoolExecutor(1) as beside:  # imports PyTorch while Ray's processes start
            reading = beside.submit(verified, config)
            if not ray.is_initialized():
                _start_ray(num_gpus, dashboard=config.alignment is not None and config.alignment.num_workers > 1)
            if problem := shortage(config, ray.cluster_resources()):
                if self._owns_ray:
                    raise ConfigError(problem)
                log.warning("%s. Waiting for it", problem)  # a cluster may grow
            serve.start(
                # clients call the router's own servers; other applications of a cluster may need proxies
                proxy_location=ProxyLocation.Disabled if self._owns_ray else ProxyLocation.EveryNode,
                http_options=HTTPOptions(host=LOOPBACK, port=free_port()),
                logging_config={"enable_access_log": False, "log_level": "WARNING"},
            )
            limits = reading.result()
        if not self._owns_ray:  # on a cluster of several machines clients need this one's address
            config = listening_at(config, self._listen, ray.util.get_node_ip_address())
        application = bind(config, limits)
        tell(f"Starting the tiers {', '.join(self.tiers)}")
        self._run(application)

    def _run(self, application: Application) -> None:
        if not self._owns_ray and self._name in serve.status().applications:  # Serve would silently replace it
            raise ConfigError(
                f"The cluster runs an application named {self._name!r} already: choose another --name, "
                f"or end that one (serve.delete({self._name!r}))"
            )
        self._deployed = True
        route = "/" if self._name == APPLICATION else f"/{self._name}"  # at the cluster's proxies
        try:
            serve.run(application, name=self._name, route_prefix=route, logging_config=QUIET)
        except RayServeException as error:  # such as another application at the same route
            raise ConfigError(f"Ray Serve does not take the application {self._name!r}: {reason(error)}") from None

    def wait(self) -> None:
        """Return at SIGINT, SIGTERM, or SIGHUP, which a terminal that closes sends, unless that is ignored, as after nohup."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _hang_up)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()

    def stop(self) -> None:
        """Stop the application, and Ray if it was started here."""
        if not ray.is_initialized():
            return
        try:
            if self._deployed:  # another application of this name is not ours
                with contextlib.suppress(RayServeException, TimeoutError):  # Serve did not start, or deleting takes long
                    serve.delete(self._name)
        finally:
            if self._owns_ray:
                ray.shutdown()  # without `serve.shutdown`, after which Ray would report its controller as killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _hang_up(number: int, frame: object) -> None:
    """Interrupt once: shell and system may each send a signal."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def listening(given: ListenConfig, host: str | None, port: int | None, grpc_port: int | None) -> ListenConfig:
    """``given`` with the host and ports that are not ``None``; raises `ConfigError` if a port is taken."""
    if host == "":
        raise ConfigError("host is '': give an address to listen at, such as 127.0.0.1, or leave it out")
    ports = {"http_port": port, "grpc_port": 0 if grpc_port is None and port == 0 else grpc_port}
    numbers: dict[str, Any] = {name: number or free_port() for name, number in ports.items() if number is not None}
    try:
        chosen = ListenConfig.model_validate(given.model_dump() | numbers | ({} if host is None else {"host": host}))
    except ValidationError as error:
        raise ConfigError(sentence(error)) from None
    for name, option, taken in (("gRPC", "--grpc-port", chosen.grpc_port), ("HTTP", "--port", chosen.http_port)):
        family = socket.AF_INET6 if ":" in chosen.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((chosen.host, taken))
            except OSError as error:
                why = error.strerror or str(error)
                raise ConfigError(
                    f"The {name} port {taken} of {chosen.host} cannot be used ({why}): choose another {option} or --host"
                ) from None
    return chosen


def listening_at(config: CascadeConfig, listen: ListenConfig, node: str | None = None) -> CascadeConfig:
    """``config`` with a router that listens on ``listen``, on this ``node`` of a cluster."""
    router = config.router.model_copy(update={"listen": listen})
    if node is not None:
        deployment = router.deployment_config
        actor = dict[str, Any](deployment.ray_actor_options)
        actor["resources"] = {f"node:{node}": 0.001} | dict(actor.get("resources") or {})
        update = {"deployment_config": deployment.model_copy(update={"ray_actor_options": actor})}
        router = router.model_copy(update=update)
    return config.model_copy(update={"router": router})


def _cause(error: Exception, application: str) -> str:
    """The cause of the first failed deployment: the last line of its traceback, without the error's name."""
    text = str(error)
    with contextlib.suppress(Exception):  # Serve may raise anything if it did not start
        states = serve.status().applications[application].deployments.items()
        text = next((f"{name}: {state.message}" for name, state in states if "rror" in state.message), text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind, colon, message = lines[-1].partition(": ") if lines else ("", "", "")
    return message if colon and "." in kind and " " not in kind else (lines or [type(error).__name__])[-1]


def free_port() -> int:
    """A free port below those that the system gives to connections, which might take it before it is used."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def _cluster() -> str:
    """Address of the Ray cluster to join; "" for none."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def _check_cluster(address: str) -> None:
    """Raise `ConfigError` if nothing listens at ``address``, since Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:  # such as auto, or ray://HOST:PORT
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"RAY_ADDRESS is {address!r}, where no cluster answers ({why}): start it, or unset it") from None


def _keep_token() -> None:
    """Give Ray a token for this process and its children, unless the user has one.

    Ray would write one to the user's folder, and from then on clusters without that token would refuse this machine.
    """
    chosen = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not chosen and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _start_ray(num_gpus: int | None, *, dashboard: bool = False) -> None:
    """Join a cluster, or start Ray on this machine, with ``num_gpus``, by default all.

    Without the ``dashboard``, Ray Train does not free the resources of workers whose learner was killed.
    """
    address = _cluster()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default would give other programs priority over the models
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # these workers would not be used
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if address:
        _check_cluster(address)
        try:
            ray.init(address=address, **options)
        except Exception as error:  # Ray may raise anything if there is no cluster or one of another version
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, which cannot be joined ({reason(error)}): start the cluster, or unset it"
            ) from None
        return
    _keep_token()
    options |= {"address": "local", "num_cpus": max(LOGICAL_CPUS, os.cpu_count() or 1), "include_dashboard": dashboard}
    options |= {"num_gpus": num_gpus} if num_gpus else {}
    for again in (True, False):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray may raise anything if one of its processes does not start, which happens
            ray.shutdown()
            if not again:
                raise ConfigError(f"Ray does not start on this machine: {reason(error)}") from error
            log.warning("Ray did not start (%s): once more", error)
