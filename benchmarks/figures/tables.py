"""The tables of documents in `benchmarks/results`, and words of theirs within a sentence; all Markdown."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import RESULTS

CARDS = Path(__file__).parents[2] / "cascade" / "family" / "weights"
TEMPERATURES = {"t0": "0", "t0.7": "0.7", "t1.0": "1"}
ENGINES = {"alone": "cascade, alone", "auto": "cascade", "vllm": "vLLM"}

Document = Mapping[str, Any]


def load(name: str) -> Document:
    """A document of `benchmarks/results`, empty if it is not there."""
    file = RESULTS / f"{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, "" without lines; all columns but the first are numbers."""
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(header)} |", f"|---|{'--:|' * (len(header) - 1)}", *body]) + "\n" if body else ""


def number(value: float | None, times: float | None = None) -> str:
    """With its ratio to ``times``, if that is given."""
    if value is None:
        return "-"
    return f"{value:.1f}" + (f" ({value / times:.2f}x)" if times else "")


def mode(figures: Document) -> str:
    """Speed of a mode, and over its engine alone."""
    return f"{figures['tokens_per_second']:.1f} ({figures['over_alone']:.2f} ± {figures['error']:.2f})"


def single(peers: Document) -> str:
    """Tokens per second of one request at a time, beside peers, in float32 and in bfloat16."""
    names = {"alone": "full model alone", "auto": "cascade"}
    names |= {"vllm_alone": "vLLM", "vllm_best": "vLLM, best drafter"}
    names |= {"llama_alone": "llama.cpp", "llama_best": "llama.cpp, best drafter"}
    lines = []
    for key, label in TEMPERATURES.items():
        speeds = {mode: cell["tokens_per_second"] for mode, cell in peers["cells"]["one"][key].items()}
        narrow = {mode.removesuffix("_bf16"): speed for mode, speed in speeds.items() if mode.endswith("_bf16")}
        best = max((speed for mode, speed in narrow.items() if mode.startswith("llama_")), default=None)
        half = {"alone": narrow.get("cascade_alone"), "auto": narrow.get("cascade_auto")}
        half |= {"llama_alone": narrow.get("llama_alone"), "llama_best": best}
        for dtype, figures in (("float32", peers["one"][key]), ("bfloat16", half)):
            theirs = [number(figures.get(name)) for name in [*names][2:]]
            lines.append([label, dtype, number(figures["alone"]), number(figures.get("auto"), figures["alone"]), *theirs])
    return rows(("temperature", "dtype", *names.values()), lines)


def by_temperature(first: str, figures: Mapping[str, Mapping[str, str]]) -> str:
    """A table of cells by temperature, as documents name it, and by line; the column of lines is named ``first``."""
    labels = {key: label for key, label in TEMPERATURES.items() if key in figures}
    names = list(dict.fromkeys(name for key in labels for name in figures[key]))
    lines = [[name, *(figures[key].get(name, "-") for key in labels)] for name in names]
    return rows((first, *(f"temperature {label}" for label in labels.values())), lines)


def modes(peers: Document) -> str:
    """Every engine with every drafter, and both over the same engine alone."""
    figures = {key: {f"`{name}`": mode(cells[name]) for name in sorted(cells)} for key, cells in peers["cells"]["one"].items()}
    return by_temperature("mode", figures)


def loads(never: Document) -> str:
    """The planner's choice over the full model alone, with several requests at once."""
    header = [f"{load} at once" for load in next(iter(never["loads"].values()))]
    lines = [
        [TEMPERATURES[key], *(f"{cell['ratio']:.2f} ± {cell['error']:.2f}" for cell in cells.values())]
        for key, cells in never["loads"].items()
    ]
    return rows(("temperature", *header), lines)


def span(never: Document) -> str:
    """The same as words within a sentence: from the worst cell to the best, and how well these are known."""
    cells = [cell for cells in never["loads"].values() for cell in cells.values()]
    ratios, errors = ([cell[name] for cell in cells] for name in ("ratio", "error"))
    return f"{min(ratios):.2f} to {max(ratios):.2f} of the full model alone (errors {min(errors):.2f} to {max(errors):.2f})"


def pair(family: Document) -> str:
    """The published pair's best mode and the planner's, over the full model alone, as words within a sentence."""
    cells = family["modes"]["cells"]["t0"]
    planner = cells["cascade_auto"]
    best = max((cell for cell in cells.values() if cell and cell is not planner), key=lambda cell: float(cell["over_alone"]))
    return " and ".join(f"{cell['over_alone']:.2f} ± {cell['error']:.2f}" for cell in (best, planner))


def contests(family: Document) -> str:
    """The published pair in each contest: tokens per second of this project and of the other engine, alone and drafting."""
    lines = []
    for engine, part, suffix in (("vLLM", "vllm", ""), ("llama.cpp", "llama", "_bf16"), ("llama.cpp in 4 bits", "llama", "")):
        for key, modes in _cells(family, part):
            theirs = {
                name.removesuffix(suffix): cell
                for name, cell in modes.items()
                if cell and name.startswith(part) and name.endswith("_bf16") is bool(suffix)
            }
            if not theirs:
                continue
            alone = theirs.pop(f"{part}_alone")
            best = max(theirs.values(), key=lambda cell: float(cell["over_alone"]))
            lines.append([engine, TEMPERATURES[key]])
            for first, second in ((modes["cascade_alone"], modes["cascade_auto"]), (alone, best)):
                lines[-1] += [number(first["tokens_per_second"]), mode(second)]
    return rows(("beside", "temperature", "cascade, no drafts", "cascade", "other, no drafts", "other, best drafter"), lines)


def placed(cluster: Document) -> str:
    """Three tiers of the map's trio over the full one alone, and over the best pair, as words within a sentence."""
    alone, pairs = (cluster["map"]["measured"][name] for name in ("three_vs_alone", "three_vs_pair"))
    return f"{alone:.1f} times as fast as the full one alone and {pairs:.1f} times the best pair"


def served(peers: Document) -> str:
    """Tokens per second over HTTP, `vllm bench serve` as the client."""
    figures = {load: cell for load, cell in peers["served"].items() if any(cell[name] for name in ENGINES)}
    lines = [[load, *(number(cell[name]) for name in ENGINES)] for load, cell in figures.items()]
    return rows(("requests at once", *ENGINES.values()), lines)


def engine(vllm: Document) -> str:
    """A full tier on vLLM beside vLLM's own server."""
    names = ("alone_vs_vllm", "suffix_vs_alone", "suffix_vs_vllm_ngram")
    lines = [[load, *(f"{cell[name]:.2f}" for name in names)] for load, cell in vllm["served"].items()]
    header = ("requests at once", "alone over `vllm serve`", "`suffix` over alone", "`suffix` over vLLM's n-gram drafter")
    return rows(header, lines)


def loop(figures: Document) -> str:
    """Milliseconds of Python from the end of a pass to the start of the next, and of what runs beside a pass."""
    names = {"alone": "alone", "suffix": "with `suffix`", "below": "with a tier below"}
    header = [f"{sessions} sessions" for sessions in figures["gap_ms"]["alone"]]
    lines = [
        [
            label,
            *(f"{gap:.2f} + {figures['rest_ms'][setup][sessions]:.2f}" for sessions, gap in figures["gap_ms"][setup].items()),
        ]
        for setup, label in names.items()
    ]
    return rows(("", *header), lines)


def router(figures: Document) -> str:
    """Share of a core for a thousand tokens a second, and what clients saw of them."""
    header = ("protocol", "streams", "share of a core", "first token, ms", "gap, ms", "gap, 99th percentile, ms")
    lines = [
        [api, streams, f"{entry['core_share']:.2f}", *(f"{entry[name]:.0f}" for name in ("first_ms", "gap_ms", "gap_p99_ms"))]
        for api, loads in figures["router"].items()
        for streams, entry in loads.items()
    ]
    return rows(header, lines)


def accelerated(gpu: Document) -> str:
    """Milliseconds of a pass on a GPU, of its kernels, and of vLLM's own step."""
    counts = ("1", "4", "8", "16", "32", "64")
    header = (
        "model",
        "1 token",
        *(f"{count} tokens" for count in counts[1:]),
        "kernels of 1 row",
        "vLLM's own step",
        "same text",
    )
    lines = []
    for name, entry in gpu["models"].items():
        if "passes" in entry:
            times = [f"{entry['passes']['by_tokens'][count]:.2f}" for count in counts]
            beside = entry.get("busy", {}).get("1", {}).get("device_ms"), entry.get("vllm_step_ms", {}).get("1")
            same = f"{entry['text']['same']} of {entry['text']['tokens']}"
            lines.append([name, *times, *("-" if value is None else f"{value:.2f}" for value in beside), same])
    return rows(header, lines)


def one_gpu(gpu: Document) -> str:
    """Tokens per second of three tiers on one GPU, of drafters alone, and of vLLM's own server."""
    modes = {"vllm": "`vllm serve`", "vllm_ngram": "`vllm serve`, n-gram", "alone": "alone", "suffix": "`suffix`"}
    modes |= {"tiers": "three tiers", "auto": "planner"}
    lines = [
        [load, *(number(figures.get(mode, {}).get("tokens_per_second")) for mode in modes)]
        for load, figures in gpu.get("served", {}).get("versus", {}).items()
    ]
    return rows(("requests at once", *modes.values()), lines)


def devices(cluster: Document) -> str:
    """Three tiers with an emulated device each, and what the planner chooses, over the full model alone."""
    cells = cluster.get("scale") or {"": {}}
    header = [f"{load} at once" for load in next(iter(cells.values()))]
    lines = [
        [replicas, *(f"{cell['ratios']['three']:.2f}, {cell['ratios']['auto']:.2f}" for cell in figures.values())]
        for replicas, figures in cells.items()
    ]
    return rows(("replicas: tiny/medium/full", *header), lines)


def emulated(cluster: Document) -> str:
    """One request on emulated devices: every mode over the full model alone, as measured and as the simulator has it."""
    modes = cluster.get("one", {}).get("modes", {})
    alone = modes.get("alone", {})
    lines = [
        [name, *(f"{figures[key] / alone[key]:.2f}" for key in ("tokens_per_second", "simulated"))]
        for name, figures in modes.items()
    ]
    return rows(("mode", "over alone", "simulated"), lines)


def mapped(cluster: Document) -> str:
    """A trio of the map, served on emulated devices: as `emulated` has it."""
    return emulated({"one": cluster["map"]}) if "map" in cluster else ""


def recorded(cluster: Document) -> str:
    """The published pair, served on emulated devices: as `emulated` has it."""
    return emulated({"one": cluster["pair"]}) if "pair" in cluster else ""


def trio(cluster: Document) -> str:
    """What the passes of emulated devices take, in milliseconds."""
    sizes = list(next(iter(cluster["devices"].values()))["pass_ms"])
    header = ("model", *(f"{size} tokens" if size != "1" else "1 token" for size in sizes), "for 1,000 positions held")
    lines = [
        [name, *(f"{figures['pass_ms'][size]:.2f}" for size in sizes), f"{figures['context_ms']:.2f}"]
        for name, figures in cluster["devices"].items()
    ]
    return rows(header, lines)


def text_drafters(document: Document) -> str:
    """Text drafters where a pass of many tokens costs as much as one: speed over the model alone."""
    modes = [mode for mode in next(iter(document["head"].values())) if mode != "alone"]
    lines = [[TEMPERATURES[key], *(f"{figures[mode]:.2f}" for mode in modes)] for key, figures in document["head"].items()]
    return rows(("temperature", *(f"`{mode}`" for mode in modes)), lines)


def agreeing(family: Document) -> str:
    """Share of the larger model's tokens that the smaller one says too, by kind of prompt."""
    figures = {
        key: {kind: f"{share:.2f}" for kind, share in cell["kinds"].items()} for key, cell in _cells(family, "agreement")
    }
    return by_temperature("prompts", figures)


def ranks(family: Document) -> str:
    """Where the smaller model is wrong: how often each of its runner-ups is right."""
    figures = {
        key: {f"runner-up {rank}": f"{share:.2f}" for rank, share in enumerate(cell["ranks"], 1)}
        for key, cell in _cells(family, "agreement")
    }
    return by_temperature("", figures)


def apart(family: Document) -> str:
    """The pair with a device for each model, simulated: over alone, and corrections that were prepared, by prices of passes."""
    cells = {
        key: {price: f"{shares['over_alone']:.2f}, {shares['prepared']:.2f}" for price, shares in cell.items()}
        for key, cell in _cells(family, "devices")
    }
    return by_temperature("passes", cells)


def ways(family: Document) -> str:
    """Every way to draft with the pair."""
    figures = {key: {f"`{name}`": mode(cell) for name, cell in cells.items()} for key, cells in _cells(family, "modes")}
    return by_temperature("mode", figures)


def beside(family: Document) -> str:
    """The pair beside other engines that draft with it, each over its own full model alone."""
    parts = [_cells(family, part) for part in ("vllm", "llama")]
    lines = [
        [f"`{name}`", key.removeprefix("t"), mode(cell)]
        for cells in parts
        for key, modes in cells
        for name, cell in modes.items()
        if cell
    ]
    return rows(("mode", "temperature", "tokens/s (over its own model alone)"), lines)


def long_prompts(family: Document) -> str:
    """By length of the prompt: agreement, tokens per second after the first one, and seconds until it, new and known."""
    ways = {"alone": "1.5B alone", "tiny": "0.5B drafts", "auto": "planner"}
    waits = ("first_token_s", "first_token_s_known_prefix")
    lines = [
        [
            f"{int(length):,}",
            f"{cell['agreement']:.2f}",
            *(number(cell[way]["tokens_per_second"]) for way in ways),
            *(f"{cell[way][wait]:.1f}" for wait in waits for way in ("alone", "auto")),
        ]
        for length, cell in _cells(family, "long")
    ]
    seconds = ("first token, alone", "planner", "prefix known, alone", "planner")
    return rows(("tokens of a prompt", "agreement", *ways.values(), *seconds), lines)


def _cells(family: Document, part: str) -> Iterable[tuple[str, Document]]:
    return tuple(family.get(part, {}).get("cells", {}).items())


def third_tier(document: Document) -> str:
    """Speeds over the full model alone of pairs and of three tiers, and what the third tier adds, simulated."""
    lines = []
    for row in document.get("rows", ()):
        over = row["over_alone"]
        pairs = over["tiny → full"], over["medium → full"]
        three = over["tiny → medium → full"]
        shares = ", ".join(f"{share:.2f}" for share in row["agreement"])
        cells = (
            shares,
            str(row["load"]),
            *(f"{pair:.2f}" for pair in pairs),
            f"{three:.2f}",
            f"{three / max(1.0, *pairs):.2f}",
        )
        lines.append([row["trio"], *cells, f"{over['planner']:.2f}"])
    header = ("full, medium, tiny", "agreement of tiny, medium", "at once", "tiny pair", "medium pair", "three")
    return rows((*header, "three over best", "planner"), lines)


def pipespec(document: Document) -> str:
    """PipeSpec's speeds as it measured them, and as the simulator predicts them: milliseconds a token."""
    lines = [
        [mode, f"{entry['measured_ms']:.1f}", f"{entry['predicted_ms']:.1f}", f"{entry['ratio']:.3f}"]
        for mode, entry in document["pipespec"].items()
    ]
    return rows(("mode", "measured, ms a token", "predicted", "predicted over measured"), lines)


def chain(document: Document) -> str:
    """What this chain would give with PipeSpec's models: speed over 70B alone, by what passes cost."""
    modes = list(next(iter(document["chain"].values())))
    lines = [
        [costs, *(f"{figures[mode]['over_alone']:.2f}" for mode in modes[1:])] for costs, figures in document["chain"].items()
    ]
    return rows(("passes", *modes[1:]), lines)


def llama(document: Document) -> str:
    """Words within a sentence: what 1B alone and both drafts give 70B on H100s."""
    figures = next(modes for costs, modes in document["chain"].items() if "H100" in costs)
    tiny, both = (figures[mode]["over_alone"] for mode in ("1B → 70B", "1B → 8B → 70B"))
    return f"{tiny:.2f} times the speed of 70B, and both {both:.2f}"


def shipped() -> str:
    """Agreement of the models that ship with their full model, from their model cards."""
    lines = []
    for name in ("tiny", "medium"):
        card = (CARDS / name / "README.md").read_text(encoding="utf-8")
        facts = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))
        numbers = [f"{float(facts[label]):.2f}" for label in TEMPERATURES.values()]
        lines.append([f"`{name}`", facts["parameters"], facts["share of the teacher's weights that a pass reads"], *numbers])
    return rows(
        ("model", "parameters", "share of a pass's weights", *(f"temperature {label}" for label in TEMPERATURES.values())),
        lines,
    )


def drafters(document: Document) -> str:
    """Every drafter alone, and the planner's choice: speed over the full model alone, and tokens of one of its passes."""
    figures = {
        key: {
            name: f"{entry[key]['speedup']:.2f}, {entry[key]['accepted_len']:.2f}"
            for name, entry in document["head"]["drafters"].items()
        }
        for key in TEMPERATURES
    }
    return by_temperature("mode", figures)


def rules(document: Document) -> str:
    """What each rule accepts of the same drafts: the first guess, and tokens of a window."""
    figures = document["temperatures"]
    names = next(iter(figures.values()))["rules"]
    cells = {name: [of["rules"][name] for of in figures.values()] for name in names}
    lines = [
        [name, *(f"{entry['first']:.2f}, {entry['accepted']:.2f} ± {entry['error']:.2f}" for entry in line)]
        for name, line in cells.items()
    ]
    return rows(("rule", *(f"temperature {float(key):g}" for key in figures)), lines)


def aligned(document: Document) -> str:
    """What a change of traffic cost drafters, and what they have learnt back."""
    lines = []
    for name, figures in document["learning"].items():
        shares = [f"{figures[which][when]:.2f}" for which in ("old", "new") for when in ("before", "after")]
        back = "-" if figures["recovered"] is None else f"{figures['recovered']:.0%}"
        lines.append([f"`{name}`", *shares, back, f"{figures['course'][-1][0]:.0f}"])
    columns = ("chats", "chats, after", "Java", "Java, after", "recovered", "seconds")
    return rows(("drafter", *columns), lines) + "".join(course(name, figures) for name, figures in document["learning"].items())


def course(name: str, figures: Document) -> str:
    """Agreement of a drafter before the change of traffic, right after it, and with the weights of each round, as a chart."""
    seconds, new, _ = zip(*figures["course"], strict=True)
    marks = ["chats", "change to Java", *(f"new weights, {second:.0f} s" for second in seconds[1:])]
    axis, shares = ", ".join(f'"{mark}"' for mark in marks), ", ".join(map(str, (round(figures["old"]["before"], 3), *new)))
    lines = (f'title "{name}"', f"x-axis [{axis}]", 'y-axis "agreement" 0 --> 1', f"line [{shares}]")
    return "\n```mermaid\nxychart-beta\n" + "".join(f"    {line}\n" for line in lines) + "```\n"
