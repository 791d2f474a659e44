"""A server on this machine, or on the cluster it belongs to: the comfortable front door of `cascade serve`."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

from cascade.config import CascadeConfig
from deployments.app import build, parse

APPLICATION = "cascade"
DEFAULT_PORT = 9000
SERVICER = "deployments.ingress.add_CascadeServicer_to_server"
LOGICAL_CPUS = 16  # of a Ray started here: tiers share the cores of one machine as they like


class Server:
    """A running cascade: ``address`` is for clients, ``tiers`` are the names bottom to top."""

    def __init__(self, config: CascadeConfig, address: str, owns_ray: bool) -> None:
        self.config = config
        self.address = address
        self.tiers = config.names
        self._owns_ray = owns_ray

    @classmethod
    def start(cls, config: CascadeConfig | Mapping[str, Any] | Path | None = None, *, port: int | None = None) -> Self:
        """Start everything and return when all tiers are ready; ``port`` 0 takes any free one.

        Joins the Ray cluster that ``RAY_ADDRESS`` names, else starts Ray on this machine. Raises `ConfigError`.
        """
        parsed = CascadeConfig.load(config) if isinstance(config, Path) else parse(config)
        application = build(parsed)  # before anything is started, so that wrong configurations leave nothing behind
        port = DEFAULT_PORT if port is None else port or free_port()
        joins = ray.is_initialized() or bool(_cluster())
        if not ray.is_initialized():
            _start_ray()
        server = cls(parsed, f"127.0.0.1:{port}", owns_ray=not joins)
        try:
            serve.start(
                proxy_location=ProxyLocation.EveryNode,
                http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
                grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[SERVICER]),
                logging_config={"enable_access_log": False, "log_level": "WARNING"},
            )
            serve.run(application, name=APPLICATION, route_prefix="/")
        except BaseException:
            server.stop()
            raise
        return server

    def wait(self) -> None:
        """Until Ctrl-C or a request to terminate."""
        stopped = threading.Event()

        def stop(number: int, frame: FrameType | None) -> None:
            stopped.set()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            stopped.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Stop the tiers, and Ray if it was started here; whatever else runs on a cluster that was joined goes on."""
        if ray.is_initialized():
            if self._owns_ray:
                serve.shutdown()
                ray.shutdown()
            else:
                serve.delete(APPLICATION)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _cluster() -> str:
    """Address of the Ray cluster to join, "" if there is none."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def _start_ray() -> None:
    address = _cluster()
    os.environ.setdefault("RAY_worker_niceness", "0")  # else everything else on the machine goes before the models
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if address:
        ray.init(address=address, **options)
    else:
        ray.init(address="local", num_cpus=max(LOGICAL_CPUS, os.cpu_count() or 1), include_dashboard=False, **options)
