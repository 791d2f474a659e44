"""`cascade demo`: the demonstration family, served, and compared with the full one alone."""

import secrets
from dataclasses import replace

import click
from rich.progress import Progress

from cascade.bench.measure import PROMPTS, Mode, Stream, measure
from cascade.cli import screen
from cascade.cli.generate import show_stream
from cascade.cli.screen import console
from cascade.cli.serve import started
from cascade.params import SamplingParams, Speculation

SAMPLED = 0.7  # temperature of text that does not repeat itself as greedy text of small models does


@click.command()
@click.option("--prompt", default=PROMPTS[0], help="What the models go on with.")
@click.option("--max-tokens", default=160, show_default=True)
@click.option("--temperature", "-t", type=float, help="Of all answers; 0.7 for the first, then 0 and 0.7 if not given.")
@click.option("--port", type=int, help="gRPC port. Any free one unless given.")
def demo(prompt: str, max_tokens: int, temperature: float | None, port: int | None) -> None:
    """Start the demonstration family on this machine, stream one answer, compare with the full model alone, shut down."""
    from cascade.client import Client

    params = SamplingParams(max_tokens=max_tokens, temperature=SAMPLED if temperature is None else temperature, seed=1)
    name = f"cascade-demo-{secrets.token_hex(3)}"  # on a cluster that is joined others may run
    with started(None, port=port or 0, http_port=0, name=name) as server, Client(server.address) as client:
        show_stream(client.stream, prompt, params, Speculation(tiers=server.names[:-1]), server.names)
        for compared in (0.0, SAMPLED) if temperature is None else (temperature,):
            compare(client.stream, replace(params, temperature=compared), server.names, rounds=1)


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
    console.print(f"\n[bold]Temperature {params.temperature:g}[/]")
    same = all(result.texts == results[0].texts for result in results)
    console.print(screen.speeds(results, "full alone"))
    console.print(screen.acceptance(edge for result in results[-1:] for edge in result.edges.values()))
    console.print("All modes gave the same text." if same else "[bold red]The modes gave different texts.[/]")
