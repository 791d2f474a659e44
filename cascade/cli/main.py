"""The command line. Only it and `cascade.commands` print."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from cascade.bench.measure import PROMPTS, Mode, Stream, measure
from cascade.cli import screen
from cascade.cli.bench import bench
from cascade.cli.options import parameters, sampling_options
from cascade.cli.top import top
from cascade.errors import CascadeError, ConfigError
from cascade.params import DEFAULT_WINDOW, SamplingParams, Speculation

console = Console(highlight=False)
DEFAULT_ADDRESS = "127.0.0.1:9000"


class Cli(click.Group):
    """Shows the errors that users can mend as one sentence instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CascadeError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="cascade-serve", prog_name="cascade")
def main() -> None:
    """Serve a large language model several times faster, without changing a token of what it says.

    \b
    cascade demo                        see it work: three embedded models, one prompt, a comparison
    cascade serve                       the same models as a server for gRPC clients
    cascade serve my.yaml               your own models
    cascade check my.yaml               what they will need, and whether they fit together
    cascade generate "def main():"      ask the server
    cascade bench                       how much faster it is, under load
    cascade top                         watch a server
    """


@main.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--host", help="Address to listen at. This machine's loopback unless given; 0.0.0.0 is everywhere.")
@click.option("--port", type=click.IntRange(0, 65535), help="gRPC port; 0 is any free one. 9000 unless given.")
@click.option("--http-port", type=click.IntRange(0, 65535), help="HTTP port; 0 is any free one. 8000 unless given.")
def serve(config: Path | None, host: str | None, port: int | None, http_port: int | None) -> None:
    """Serve the tiers of CONFIG, a YAML file, until Ctrl-C; the embedded family without one."""
    from deployments.server import Server

    with console.status("Starting Ray and the tiers"):
        server = Server.start(config, host=host, port=port, http_port=http_port)
    try:
        console.print(f"[bold green]Serving[/] {', '.join(server.tiers)} on [bold]{server.address}[/]. Ctrl-C stops.")
        console.print(f"HTTP, and a page to look at: [bold]{server.url}[/]\n")
        console.print(usage(server.address, server.url, server.model), markup=False, soft_wrap=True)  # to be copied
        server.wait()
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


@main.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check(config: Path) -> None:
    """Say what the tiers of CONFIG need and whether they fit together, without loading a weight.

    Ends with status 1 and a sentence if they do not.
    """
    from cascade.settings.check import needs, remarks, verify
    from cascade.settings.config import CascadeConfig
    from deployments.app import build

    parsed = CascadeConfig.load(config)
    with console.status("Reading configurations"):
        found = needs(parsed)
    console.print(screen.needs(found))
    verify(parsed)
    build(parsed.model_copy(update={"verify": False}))  # whether Ray Serve takes the options of deployments
    problem = next((need.problem for need in found if need.problem), None)
    if problem:
        raise ConfigError(problem)
    for remark in remarks(found):
        console.print(remark)
    console.print("The tiers fit together.")


@main.command()
@click.option("--prompt", default=PROMPTS[0], help="What the models go on with.")
@click.option("--max-tokens", default=160, show_default=True)
@click.option("--temperature", "-t", default=0.0, show_default=True)
@click.option("--port", type=int, help="gRPC port. Any free one unless given.")
def demo(prompt: str, max_tokens: int, temperature: float, port: int | None) -> None:
    """Start three embedded models on this machine, stream one answer, compare with the full model alone, shut down."""
    from cascade.client import Client
    from deployments.server import Server

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    with console.status("Starting Ray and the tiers (tiny, medium, full) on this machine's CPU"):
        server = Server.start(None, port=port or 0, http_port=0)
    try:
        with Client(server.address) as client:
            show_stream(client.stream, prompt, params, Speculation(tiers=server.tiers[:-1]), server.tiers)
            compare(client.stream, params, server.tiers, rounds=1)
    finally:
        with console.status("Shutting down"):
            server.stop()


@main.command()
@click.argument("prompt")
@click.option("--address", help=f"Of a server. Without one the models run in this process. Example: {DEFAULT_ADDRESS}")
@click.option("--model", "models", multiple=True, help="A path or hub id, bottom to top; repeat. The embedded family if none.")
@click.option("--plain", is_flag=True, help="No colours, no statistics.")
@sampling_options
def generate(prompt: str, address: str | None, models: tuple[str, ...], plain: bool, **options: Any) -> None:
    """Go on with PROMPT ("-" reads it from standard input), streaming."""
    params, speculation = parameters(options)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    with connected(address, models) as (stream, names):
        if plain:
            for chunk in stream(prompt, params, speculation):
                click.echo(chunk.text, nl=False)
            click.echo()
        else:
            show_stream(stream, prompt, params, speculation, names)


@main.command()
@click.option("--tier", "tiers", multiple=True, metavar="NAME=MS", help="Milliseconds of one pass; bottom to top; repeat.")
@click.option("--accept", multiple=True, type=float, metavar="SHARE", help="Acceptance of each edge; bottom to top; repeat.")
@click.option("--accept-full", multiple=True, type=float, metavar="SHARE", help="The same by the full tier. Product of edges.")
@click.option("--growth", default=0.025, show_default=True, help="What each further token of a pass adds, as a share of it.")
@click.option("--hop", default=0.4, show_default=True, help="Milliseconds from a tier to the next, one way.")
@click.option("--shared", default="", metavar="NAMES", help="Tiers that share one device, such as tiny,medium.")
@click.option(
    "--window", default=DEFAULT_WINDOW, show_default=True, help="Tokens a tier may run ahead of the tier above, async."
)
@click.option("--requests", default=1, show_default=True, help="Requests at once.")
def simulate(
    tiers: tuple[str, ...],
    accept: tuple[float, ...],
    accept_full: tuple[float, ...],
    growth: float,
    hop: float,
    shared: str,
    window: int,
    requests: int,
) -> None:
    """Predict the speed-up over the full model alone, of every choice of tiers, lockstep and async.

    Runs the real sessions in virtual time. The defaults are three tiers such as 1 B, 8 B and 70 B models:

    \b
    cascade simulate --tier tiny=2 --tier medium=6 --tier full=30 --accept 0.75 --accept 0.85
    """
    from cascade.chain.profile import PassCost
    from cascade.simulation.forecast import Acceptance, TierCost, prediction_rows

    pairs = [_tier_cost(tier) for tier in tiers or ("tiny=2", "medium=6", "full=30")]
    shares = accept or ((0.75, 0.85) if not tiers else ())
    if len(shares) != len(pairs) - 1 or len(accept_full) not in (0, len(shares)):
        raise click.UsageError(f"{len(pairs)} tiers have {len(pairs) - 1} edges: give --accept once for each")
    if not all(0 <= share <= 1 for share in (*shares, *accept_full)):
        raise click.UsageError("--accept and --accept-full are shares from 0 to 1")
    together = set(filter(None, shared.split(",")))
    if unknown := together - {name for name, _ in pairs}:
        raise click.BadParameter(f"{unknown.pop()!r} is no tier: give names of --tier", param_hint="--shared")
    costs = [
        TierCost(name, PassCost(ms / 1e3, growth * ms / 1e3), hop / 1e3, device="shared" if name in together else name)
        for name, ms in pairs
    ]
    with console.status("Simulating"):
        rows = prediction_rows(costs, Acceptance(shares, accept_full), window=window, num_requests=requests)
    console.print(screen.predictions(rows))


def _tier_cost(text: str) -> tuple[str, float]:
    name, _, ms = text.partition("=")
    try:
        cost = float(ms)
    except ValueError:
        cost = 0.0
    if not name or not 0 < cost < float("inf"):
        raise click.BadParameter(f"{text!r}: it must be NAME=MILLISECONDS, such as full=30", param_hint="--tier")
    return name, cost


@main.group()
def family() -> None:
    """The embedded models: train them again, or judge how well they predict and agree."""


@family.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path(".family"), show_default=True, help="Checkpoints.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("family"), show_default=True, help="The models.")
@click.option("--device", default="cpu", show_default=True, help="Such as cuda.")
@click.option("--threads", type=int, help="CPU threads. All cores if not given.")
@click.option("--compiled/--plain", default=True, help="Compile the training step: a fifth faster, needs a C++ compiler.")
def train(work: Path, out: Path, device: str, threads: int | None, compiled: bool) -> None:
    """Run the recipe on the source of the standard library; goes on where it was interrupted. Hours on a CPU."""
    from cascade.family.recipe import train_family

    click.echo(json.dumps(train_family(work, out, device=device, threads=threads, compiled=compiled), indent=2))


@family.command()
@click.option("--models", type=click.Path(exists=True, path_type=Path), help="Folder of tiny, medium, full. The embedded ones.")
@click.option("--device", default="cpu", show_default=True, help="Such as cuda.")
def judge(models: Path | None, device: str) -> None:
    """Loss on held-out files, agreement and acceptance of each edge, as JSON. Minutes on a CPU."""
    from cascade.family import WEIGHTS
    from cascade.family.evaluate import evaluate_family

    click.echo(json.dumps(evaluate_family(models or WEIGHTS, device=device), indent=2))


def show_stream(stream: Stream, prompt: str, params: SamplingParams, speculation: Speculation, names: tuple[str, ...]) -> None:
    """Print the answer as it comes, coloured by history, and what it took."""
    console.print(screen.legend(names), "\n")
    console.print(prompt, end="", style="dim", markup=False)
    completion = None
    for chunk in stream(prompt, params, speculation):
        console.print(screen.coloured(chunk), end="")
        completion = chunk.completion or completion
    console.print("\n")
    if completion is not None:
        if completion.logprobs:
            console.print(screen.logprobs(completion))
        stats = completion.stats
        console.print(
            f"{stats.completion_tokens} tokens in {stats.full_passes} full passes "
            f"({stats.tokens_per_full_pass:.2f} tokens per pass), finish: {completion.finish_reason}, seed {completion.seed}\n"
        )


def compare(stream: Stream, params: SamplingParams, names: tuple[str, ...], *, rounds: int) -> None:
    """Measure the full model alone, the cascade as it chooses its tiers itself, and every chain; print the tables."""
    lower = names[:-1]
    chains = [(name,) for name in lower] + ([lower] if len(lower) > 1 else [])
    modes = [Mode("full alone", Speculation("off")), Mode("cascade", Speculation())]
    modes += [Mode(" → ".join((*chain, names[-1])), Speculation(tiers=chain)) for chain in chains]
    total = rounds * len(PROMPTS) * len(modes)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=total)
        results = measure(stream, modes, params, rounds=rounds, step=lambda: progress.advance(task))
    same = all(result.texts == results[0].texts for result in results)
    console.print(screen.speeds(results, "full alone"))
    console.print(screen.acceptance(edge for result in results[-1:] for edge in result.edges.values()))
    console.print("All modes gave the same text." if same else "[bold red]The modes gave different texts.[/]")


class connected:
    """A stream function and the names of the tiers: of a server, or of a cascade in this process."""

    def __init__(self, address: str | None, models: tuple[str, ...]) -> None:
        self._address = address
        self._models = models

    def __enter__(self) -> tuple[Stream, tuple[str, ...]]:
        if self._address:
            from cascade.client import Client

            self._open: Any = Client(self._address, api_key=os.environ.get("CASCADE_API_KEY"))
            return self._open.stream, tuple(tier.name for tier in self._open.describe().tiers)
        if not self._models:
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the embedded models load in no time
        from cascade.local import Cascade

        with console.status("Loading models"):
            self._open = Cascade.from_pretrained(self._models) if self._models else Cascade.demo()
        return self._open.stream, self._open.names

    def __exit__(self, *error: object) -> None:
        self._open.close()


main.add_command(bench)
main.add_command(top)

if __name__ == "__main__":
    main()
