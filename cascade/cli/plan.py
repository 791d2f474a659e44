"""`cascade agreement`, `layers`, `plan`: how often models agree, and how fast a cascade of them would be on given devices."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cascade.cli.options import DRAFT, FILE, Finite, counts
from cascade.cli.screen import console
from cascade.errors import ConfigError
from cascade.params import SamplingParams
from cascade.prompts import BUILT_IN, Prompt, read_prompts

if TYPE_CHECKING:
    from cascade.planner.cost import Profile
    from cascade.simulation.plan import Prediction
    from cascade.simulation.recording import Recording

TRIALS = 50  # swaps of a layer that `cascade layers` tries
SHARES = Finite(0, 1, min_open=True)
PROMPTS = click.option(
    "--prompts",
    type=FILE,
    callback=lambda context, parameter, path: read_prompts(path) if path else BUILT_IN,
    help="Prompts, one a line: text, or JSON as in Spec-Bench, HumanEval or GSM8K; by default the 48 that ship.",
)


@click.command()
@click.argument("model")
@DRAFT
@PROMPTS
@click.option("--max-tokens", type=click.IntRange(2), default=96, show_default=True, help="Tokens of an answer at most.")
@click.option("--temperature", "-t", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Result, for `cascade plan --measured`.")
def agreement(
    model: str, drafts: tuple[str, ...], prompts: Sequence[Prompt], max_tokens: int, temperature: float, out: Path | None
) -> None:
    """Measure how often smaller models agree with MODEL, along its own answers.

    \b
    cascade agreement Qwen/Qwen3-32B --draft Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --prompts mine.jsonl --out measured.json
    """
    from cascade.agreement import agreement as shares
    from cascade.agreement import record

    if not drafts:
        raise click.UsageError("There is nothing to compare MODEL with: name a smaller model with --draft")
    if out is not None and not out.parent.is_dir():
        raise click.BadParameter(f"{out.parent} is not a folder: create it first", param_hint="--out")
    models = [*reversed(drafts), model]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with console.status(f"{model} answers, and the others guess along its answers"):
        recording = record(models, prompts, params)
    if not recording.texts:
        raise ConfigError(f"{model} ended every answer at once: give other prompts")
    table = Table(
        "tier", "kind", "positions", "agrees", "after an error", "1st runner-up", "2nd", box=SIMPLE_HEAD, pad_edge=False
    )
    kinds = [None, *dict.fromkeys(text.category for text in recording.texts)]
    for tier, name in enumerate(models[:-1]):
        for kind in kinds if len(kinds) > 2 else kinds[:1]:
            share = shares(recording, tier, kind)
            after = "-" if share.after_error is None else f"{share.after_error:.2f}"
            ranks = [f"{rate:.2f}" for rate in share.runner_ups]
            table.add_row("" if kind else name, kind or "all", f"{share.positions:,}", f"{share.own:.2f}", after, *ranks)
    console.print(table)
    console.print("Runner-ups: how often they are right where the tier's own token is wrong.", style="dim")
    if out is not None:
        recording.save(out)
        console.print(f"Written to {out}; use it with: cascade plan ... --measured {out}", markup=False, soft_wrap=True)


@click.command()
@click.argument("model")
@click.option("--share", "shares", multiple=True, type=SHARES, required=True, help="Of the model's pass, such as 0.5; repeat.")
@PROMPTS
@click.option("--max-tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens of an answer at most.")
def layers(model: str, shares: tuple[float, ...], prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Find the layers of MODEL to keep for a share of its pass. As a tier they draft for MODEL without training.

    The search uses half of the prompts; the other half measure how often the layers agree with MODEL.

    \b
    cascade layers Qwen/Qwen3-8B --share 0.5 --share 0.75 --prompts mine.jsonl
    """
    from cascade.agreement import search
    from cascade.engine.layers import shown

    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    table = Table("layers", "kept", "share of a pass", "agrees", box=SIMPLE_HEAD, pad_edge=False)
    with console.status(f"{model} answers") as status:
        for best in search(model, prompts, params, sorted(shares, reverse=True), TRIALS, status.update):
            kept = f"{len(best.layers)} of {best.num_layers}"
            table.add_row(shown(best.layers), kept, f"{best.share:.2f}", f"{best.agreement:.2f}")
    console.print(table)
    console.print(f"To serve them as a tier: engine_kwargs: {{layers: [{shown(best.layers)}]}}", markup=False, soft_wrap=True)


@click.command()
@click.argument("model", required=False)
@DRAFT
@click.option("--agreement", "shares", multiple=True, type=SHARES, help="How often a draft agrees with MODEL; for each draft.")
@click.option("--measured", type=FILE, help="Result of `cascade agreement --out`.")
@click.option("--device", "devices", multiple=True, help="Such as H100; once for all models, or once for each, MODEL's first.")
@click.option("--tensor-parallel-size", type=click.IntRange(1), default=1, show_default=True, help="Devices that share MODEL.")
@click.option(
    "--pass-ms", multiple=True, type=Finite(0, min_open=True), help="In place of models: milliseconds of passes, MODEL's first."
)
@click.option("--load", default="1,8", show_default=True, callback=counts, help="Requests at once.")
@click.option("--prompt-tokens", type=click.IntRange(1, 8192), default=256, show_default=True, help="Tokens of a prompt.")
@click.option("--max-tokens", type=click.IntRange(16, 4096), default=128, show_default=True, help="Tokens of an answer.")
def plan(
    model: str | None,
    drafts: tuple[str, ...],
    shares: tuple[float, ...],
    measured: Path | None,
    devices: tuple[str, ...],
    tensor_parallel_size: int,
    pass_ms: tuple[float, ...],
    load: tuple[int, ...],
    prompt_tokens: int,
    max_tokens: int,
) -> None:
    """Predict tokens per second of MODEL without drafts, of pairs, and of all tiers, on devices that are not at hand.

    Each tier has devices of its own. Pass times are computed from sizes of models and data sheets of devices, or given. No
    weight is loaded.

    \b
    cascade plan Qwen/Qwen3-32B --draft Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --device H100 --measured measured.json
    cascade plan --pass-ms 80 --pass-ms 20 --pass-ms 2 --agreement 0.88 --agreement 0.70
    """
    from cascade.local import tier_names
    from cascade.simulation.costs import flat
    from cascade.simulation.plan import Traffic, predict, recorded_tiers, toy_tiers
    from cascade.simulation.recording import Recording

    if pass_ms and (model or drafts or devices):
        raise click.UsageError("--pass-ms replaces MODEL, --draft and --device: give only one of the two")
    costs: Sequence[Profile]
    costs, vocab = (flat(*reversed(pass_ms)), 0) if pass_ms else _computed(model, drafts, devices, tensor_parallel_size)
    num_drafts = len(costs) - 1
    if not num_drafts:
        raise click.UsageError(
            "Nothing to compare the full model with: name a smaller one with --draft, or give its --pass-ms, too"
        )
    if bool(shares) == (measured is not None):
        raise click.UsageError("Say how often the drafts agree: --agreement for each --draft, or --measured FILE")
    recording = None if measured is None else Recording.load(measured)
    num_shares = len(shares) if recording is None else recording.num_tiers - 1
    if num_shares != num_drafts:
        raise click.UsageError(f"There are {num_drafts} drafts, and agreement is given for {num_shares}: give it for each")
    names = tier_names(costs, None)
    if recording is None:
        tiers = toy_tiers(names, costs, tuple(reversed(shares)))
    else:
        tiers = recorded_tiers(names, costs, recording, vocab or 1 + max(max(text.prompt) for text in recording.texts))
    ranks = tensor_parallel_size + (num_drafts if len({*devices}) < 2 else 0)  # others may not hold the full model
    _assumed(names, costs, shares, recording)
    traffic = Traffic(load, prompt_tokens, max_tokens)
    for prediction in predict(tiers, traffic, recording):
        _show(prediction, tensor_parallel_size, ranks)


def _computed(model: str | None, drafts: Sequence[str], devices: Sequence[str], ranks: int) -> "tuple[Sequence[Profile], int]":
    """Profiles of models, bottom to top, and the vocabulary; raises `ConfigError` if one does not fit, `ModelError`."""
    from cascade.engine.checkpoint import anatomy
    from cascade.engine.devices import ACCELERATORS as MEMORY
    from cascade.engine.memory import GIB
    from cascade.engine.model_config import read_config
    from cascade.local import tier_names
    from cascade.settings.check import Need
    from cascade.settings.config import GPU_MEMORY
    from cascade.simulation.costs import ACCELERATORS, Load

    if model is None:
        raise click.UsageError("Name MODEL and its drafts, or give --pass-ms for each tier")
    models = [model, *drafts]
    if len(devices) not in (1, len(models)):
        raise click.UsageError(f"--device is given {len(devices)} times: once for all models, or once for each")
    for device in devices:
        if device not in ACCELERATORS:
            raise click.BadParameter(f"{device} is not known: one of {', '.join(ACCELERATORS)}", param_hint="--device")
    each = devices if len(devices) > 1 else [devices[0]] * len(models)
    costs: list[Profile] = []
    for name, source, device in zip(reversed(tier_names(models, None)), models, each, strict=True):
        text, weights = read_config(source).get_text_config(), anatomy(source, sizes_only=True)
        shared = 1 if costs else ranks
        memory, kept = int(MEMORY[device] * GIB * GPU_MEMORY), weights.cache_bytes_per_token
        if problem := Need(name, weights, None, shared, 0, kept, device, memory, "vllm").problem:
            raise ConfigError(problem)
        embedding = 0 if getattr(text, "tie_word_embeddings", False) else text.vocab_size * text.hidden_size
        parameters = weights.parameters - embedding  # a pass reads one row of the input embedding for each token
        read_bytes = round(weights.weight_bytes * parameters / weights.parameters)
        load = Load(read_bytes, parameters, int(text.num_hidden_layers), kept)
        costs.append(load.profile(ACCELERATORS[device], shared))
    return costs[::-1], int(read_config(model).get_text_config().vocab_size)


def _assumed(names: Sequence[str], costs: "Sequence[Profile]", shares: Sequence[float], recording: "Recording | None") -> None:
    passes = ", ".join(f"{name} {1e3 * cost.predict(1):.2f} ms" for name, cost in zip(names, costs, strict=True))
    console.print(f"A pass of a token: {passes}.", soft_wrap=True)
    if recording is None:
        given = ", ".join(f"{name} {share:g}" for name, share in zip(names, reversed(shares), strict=False))
        console.print(f"Agreement with the full model, assumed: {given}.", soft_wrap=True)
    else:
        top = len(names) - 1
        measured = ", ".join(f"{name} {recording.shared(tier, top):.2f}" for tier, name in enumerate(names[:-1]))
        console.print(f"Agreement with the full model, measured on {len(recording.texts)} answers: {measured}.", soft_wrap=True)


def _show(prediction: "Prediction", alone_devices: int, all_devices: int) -> None:
    from cascade.simulation.plan import PLANNER

    table = Table("mode", "tokens/s", "over alone", box=SIMPLE_HEAD, pad_edge=False, title=f"{prediction.load} at once")
    for mode, speed in prediction.speeds.items():
        table.add_row(mode, f"{speed:,.1f}", f"{prediction.over_alone(mode):.2f}x")
    console.print(table)
    best = prediction.best
    gain = prediction.over_alone(best)
    if gain < 1.005:  # displayed as 1.00
        console.print("No draft pays at this load: serve the full model alone.")
        return
    console.print(f"Fastest: {best}, {gain:.2f} times the full model alone.")
    if all_devices > alone_devices and PLANNER in prediction.speeds and prediction.load > 1:
        replicas = all_devices / alone_devices
        fewer = prediction.over_alone(PLANNER)
        if fewer < replicas:
            console.print(
                f"For total tokens a second, the same {all_devices} devices as replicas of the full model would give up to "
                f"{replicas:.1f} times one replica, the cascade {fewer:.2f} times: drafts make each answer faster.",
                soft_wrap=True,
            )
