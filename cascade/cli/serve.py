"""`cascade serve`: a server on this machine, until Ctrl-C."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cascade.cli.config import configured, model_options
from cascade.cli.screen import console
from cascade.errors import ConfigError

if TYPE_CHECKING:
    from cascade.settings.config import CascadeConfig
    from deployments.ops.launch import Server


@click.command()
@model_options
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option("--port", type=click.IntRange(0, 65535), help="HTTP port; 8000 by default, 0 for any free one.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="gRPC port; 9000 by default, 0 for any free one.")
@click.option("--api-key", metavar="KEY", help="Key that clients must send, 8 characters or more.")
@click.option("--name", default="cascade", show_default=True, help="Name of the application on a Ray cluster.")
def serve(host: str | None, port: int | None, grpc_port: int | None, api_key: str | None, name: str, **models: Any) -> None:
    """Serve MODEL, a path or hub id, until Ctrl-C; smaller models of its family draft for it.

    MODEL may also be a YAML file (docs/reference/configuration.md). By default the models that ship are served.

    \b
    cascade serve Qwen/Qwen3-32B --draft Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B
    """
    config = configured(**models)
    access = config.router.access
    if api_key is not None:
        if os.environ.get("RAY_ADDRESS", "local") not in ("", "local"):  # the cluster's routers would not require the key
            raise ConfigError(f"--api-key is for this machine: set {access.keys_env} where the routers of the cluster run")
        if os.environ.get(access.keys_env):
            raise ConfigError(f"--api-key is given, and {access.keys_env} has keys: give only one of them")
        os.environ[access.keys_env] = f"cli={api_key}"
    stopping = contextlib.suppress(KeyboardInterrupt)  # also during the start: the server may answer before that ends
    with stopping, started(config, host=host, port=port, grpc_port=grpc_port, name=name) as server:
        console.print(f"[bold green]Serving[/] {', '.join(server.tiers)} on [bold]{server.address}[/]. Ctrl-C stops.")
        console.print(f"HTTP, and a page to look at: [bold]{server.url}[/]. For Prometheus: {server.url}/metrics\n")
        keyed = bool(access.keys_file or os.environ.get(access.keys_env))
        message = usage(server.address, server.url, server.model, keyed=keyed)
        console.print(message, markup=False, soft_wrap=True)  # without line breaks, for copying
        server.wait()


@contextmanager
def started(config: "CascadeConfig", **options: Any) -> Iterator["Server"]:
    """Start a server, and stop it at the end; a terminal shows the progress."""
    with console.status("Loading Ray") as status:
        from deployments.ops.launch import Server

        server = Server.start(config, tell=status.update, **options)
    try:
        yield server
    finally:
        with console.status("Shutting down once answers have ended; Ctrl-C again does not wait"):
            server.stop()


def usage(address: str, url: str, model: str, *, keyed: bool = False) -> str:
    """Commands that call a server at ``address`` and ``url``, with the key in ``CASCADE_API_KEY`` if it is ``keyed``."""
    key = '-H "Authorization: Bearer $CASCADE_API_KEY" ' if keyed else ""
    first = "  export CASCADE_API_KEY=...\n" if keyed else ""
    return f"""{first}  cascade chat --address {address}
  cascade top --address {address} --url {url}
  curl {url}/v1/completions {key}-H 'Content-Type: application/json' \\
      -d '{{"model": "{model}", "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}}'
"""
