"""`cascade serve`: a server on this machine, until Ctrl-C."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cascade.cli.screen import console

if TYPE_CHECKING:
    from deployments.launch.server import Server


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--host", help="Address to listen at. This machine's loopback unless given; 0.0.0.0 is everywhere.")
@click.option("--port", type=click.IntRange(0, 65535), help="gRPC port; 0 is any free one. 9000 unless given.")
@click.option("--http-port", type=click.IntRange(0, 65535), help="HTTP port; 0 is any free one. 8000 unless given.")
@click.option("--name", default="cascade", show_default=True, help="Of the application, on a Ray cluster that is joined.")
def serve(config: Path | None, host: str | None, port: int | None, http_port: int | None, name: str) -> None:
    """Serve the tiers of CONFIG, a YAML file, until Ctrl-C; the demonstration family without one."""
    with started(config, host=host, port=port, http_port=http_port, name=name) as server:
        console.print(f"[bold green]Serving[/] {', '.join(server.tiers)} on [bold]{server.address}[/]. Ctrl-C stops.")
        console.print(f"HTTP, and a page to look at: [bold]{server.url}[/]\n")
        console.print(usage(server.address, server.url, server.model), markup=False, soft_wrap=True)  # to be copied
        server.wait()


@contextmanager
def started(config: Path | None, **options: Any) -> Iterator["Server"]:
    """A server that is up, and is stopped at the end; a terminal shows what is being done."""
    with console.status("Loading Ray") as status:
        from deployments.launch.server import Server

        server = Server.start(config, tell=status.update, **options)
    try:
        yield server
    finally:
        with console.status("Shutting down"):
            server.stop()


def usage(address: str, url: str, model: str) -> str:
    """How to call a server at ``address`` and ``url``."""
    place = address.rpartition("/")[2]  # without grpcs://
    plain = "-plaintext " if place == address else ""
    program = sys.argv[0] if Path(sys.argv[0]).name == "cascade" and shutil.which("cascade") is None else "cascade"
    return f"""From a shell:
  {program} generate --address {address} "def fibonacci(n):"
  grpcurl {plain}-d '{{"prompt": "def fibonacci(n):", "sampling": {{"max_tokens": 64}}}}' \\
      {place} cascade.v1.Cascade/Generate
  curl {url}/v1/completions -H 'Content-Type: application/json' \\
      -d '{{"model": "{model}", "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}}'

From Python:
  from cascade.client import Client
  from cascade.params import SamplingParams

  with Client("{address}") as client:
      for chunk in client.stream("def fibonacci(n):", SamplingParams(max_tokens=64, temperature=0)):
          print(chunk.text, end="", flush=True)
"""
