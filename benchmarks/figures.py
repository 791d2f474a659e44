"""Every figure of README and docs comes from `benchmarks/results`: this writes them into the pages.

    make figures

`docs/figures.md` is written whole. In other pages, what is between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced
by the table of that name, or by the words within a sentence. A test compares both with the documents.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import RESULTS

ROOT = Path(__file__).parent.parent
README, PAGE, PLAN = ROOT / "README.md", ROOT / "docs" / "figures.md", ROOT / "docs" / "howto" / "plan.md"
CARDS = ROOT / "cascade" / "family" / "weights"
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n?).*?(<!-- end -->)", re.DOTALL)
TEMPERATURES = {"t0": "0", "t0.7": "0.7", "t1.0": "1"}
MODEL = "SmolLM2-135M-Instruct"  # of documents that name no other
ENGINES = {"alone": "cascade, alone", "auto": "cascade", "vllm": "vLLM"}

Document = Mapping[str, Any]


def load(name: str) -> Document:
    """A document of `benchmarks/results`, empty if it is not there."""
    file = RESULTS / f"{name}.json"
    found: Document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, "" without lines; all columns but the first are numbers."""
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(header)} |", f"|---|{'--:|' * (len(header) - 1)}", *body]) + "\n" if body else ""


def number(value: float | None, times: float | None = None) -> str:
    """With its ratio to ``times``, if that is given."""
    if value is None:
        return "-"
    return f"{value:.1f}" + (f" ({value / times:.2f}x)" if times else "")


def mode(found: Document) -> str:
    """Speed of a mode, and over its engine alone."""
    return f"{found['tokens_per_second']:.1f} ({found['over_alone']:.2f} ± {found['error']:.2f})"


def one(peers: Document) -> str:
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
        for dtype, found in (("float32", peers["one"][key]), ("bfloat16", half)):
            theirs = [number(found.get(name)) for name in [*names][2:]]
            lines.append([label, dtype, number(found["alone"]), number(found.get("auto"), found["alone"]), *theirs])
    return rows(("temperature", "dtype", *names.values()), lines)


def by_temperature(first: str, found: Mapping[str, Mapping[str, str]]) -> str:
    """A table of cells by temperature, as documents name it, and by line; the column of lines is named ``first``."""
    known = {key: label for key, label in TEMPERATURES.items() if key in found}
    names = list(dict.fromkeys(name for key in known for name in found[key]))
    lines = [[name, *(found[key].get(name, "-") for key in known)] for name in names]
    return rows((first, *(f"temperature {label}" for label in known.values())), lines)


def modes(peers: Document) -> str:
    """Every engine with every drafter, and both over the same engine alone."""
    found = {key: {f"`{name}`": mode(cells[name]) for name in sorted(cells)} for key, cells in peers["cells"]["one"].items()}
    return by_temperature("mode", found)


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


def placed(cluster: Document) -> str:
    """Three tiers of the map's trio over the full one alone, and over the best pair, as words within a sentence."""
    measured = cluster["map"]["measured"]
    alone, pairs = measured["three_vs_alone"], measured["three_vs_pair"]
    return f"{alone:.1f} times as fast as the full one alone and {pairs:.1f} times the best pair"


def served(peers: Document) -> str:
    """Tokens per second over HTTP, `vllm bench serve` as the client."""
    found = {load: cell for load, cell in peers["served"].items() if any(cell[name] for name in ENGINES)}
    lines = [[load, *(number(cell[name]) for name in ENGINES)] for load, cell in found.items()]
    return rows(("requests at once", *ENGINES.values()), lines)


def engine(vllm: Document) -> str:
    """A full tier on vLLM beside vLLM's own server."""
    names = ("alone_vs_vllm", "suffix_vs_alone", "suffix_vs_vllm_ngram")
    lines = [[load, *(f"{cell[name]:.2f}" for name in names)] for load, cell in vllm["served"].items()]
    header = ("requests at once", "alone over `vllm serve`", "`suffix` over alone", "`suffix` over vLLM's n-gram drafter")
    return rows(header, lines)


def loop(found: Document) -> str:
    """Milliseconds of Python from the end of a pass to the start of the next, and of what runs beside a pass."""
    names = {"alone": "alone", "suffix": "with `suffix`", "below": "with a tier below"}
    header = [f"{sessions} sessions" for sessions in found["gap_ms"]["alone"]]
    lines = [
        [label, *(f"{gap:.2f} + {found['rest_ms'][setup][sessions]:.2f}" for sessions, gap in found["gap_ms"][setup].items())]
        for setup, label in names.items()
    ]
    return rows(("", *header), lines)


def router(found: Document) -> str:
    """Share of a core for a thousand tokens a second, and what clients saw of them."""
    header = ("door", "streams", "of a core", "first token, ms", "gap, ms", "gap, 99th percentile, ms")
    lines = [
        [door, streams, f"{one['core_share']:.2f}", *(f"{one[name]:.0f}" for name in ("first_ms", "gap_ms", "gap_p99_ms"))]
        for door, loads in found["router"].items()
        for streams, one in loads.items()
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
    for name, one in gpu["models"].items():
        if "passes" in one:
            times = [f"{one['passes']['by_tokens'][count]:.2f}" for count in counts]
            beside = one.get("busy", {}).get("1", {}).get("device_ms"), one.get("vllm_step_ms", {}).get("1")
            same = f"{one['text']['same']} of {one['text']['tokens']}"
            lines.append([name, *times, *("-" if value is None else f"{value:.2f}" for value in beside), same])
    return rows(header, lines)


def one_gpu(gpu: Document) -> str:
    """Tokens per second of three tiers on one GPU, of drafters alone, and of vLLM's own server."""
    modes = {"vllm": "`vllm serve`", "vllm_ngram": "`vllm serve`, n-gram", "alone": "alone", "suffix": "`suffix`"}
    modes |= {"tiers": "three tiers", "auto": "planner"}
    lines = [
        [load, *(number(found.get(mode, {}).get("tokens_per_second")) for mode in modes)]
        for load, found in gpu.get("served", {}).get("versus", {}).items()
    ]
    return rows(("requests at once", *modes.values()), lines)


def devices(cluster: Document) -> str:
    """Three tiers with an emulated device each, and what the planner chooses, over the full model alone."""
    cells = cluster.get("scale") or {"": {}}
    header = [f"{load} at once" for load in next(iter(cells.values()))]
    lines = [
        [replicas, *(f"{cell['ratios']['three']:.2f}, {cell['ratios']['auto']:.2f}" for cell in found.values())]
        for replicas, found in cells.items()
    ]
    return rows(("replicas: tiny/medium/full", *header), lines)


def emulated(cluster: Document) -> str:
    """One request on emulated devices: every mode over the full model alone, as measured and as the simulator has it."""
    modes = cluster.get("one", {}).get("modes", {})
    alone = modes.get("alone", {})
    lines = [
        [name, *(f"{found[key] / alone[key]:.2f}" for key in ("tokens_per_second", "simulated"))]
        for name, found in modes.items()
    ]
    return rows(("mode", "over alone", "simulated"), lines)


def mapped(cluster: Document) -> str:
    """A trio of the map, served on emulated devices: as `emulated` has it."""
    return emulated({"one": cluster["map"]}) if "map" in cluster else ""


def trio(cluster: Document) -> str:
    """What the passes of emulated devices take, in milliseconds."""
    sizes = list(next(iter(cluster["devices"].values()))["pass_ms"])
    header = ("model", *(f"{size} tokens" if size != "1" else "1 token" for size in sizes), "1,000 positions held add")
    lines = [
        [name, *(f"{found['pass_ms'][size]:.2f}" for size in sizes), f"{found['context_ms']:.2f}"]
        for name, found in cluster["devices"].items()
    ]
    return rows(header, lines)


def text_drafters(document: Document) -> str:
    """Text drafters where a pass of many tokens costs as much as one: speed over the model alone."""
    modes = [mode for mode in next(iter(document["head"].values())) if mode != "alone"]
    lines = [[TEMPERATURES[key], *(f"{found[mode]:.2f}" for mode in modes)] for key, found in document["head"].items()]
    return rows(("temperature", *(f"`{mode}`" for mode in modes)), lines)


def agreeing(family: Document) -> str:
    """Share of the larger model's tokens that the smaller one says too, by kind of prompt."""
    found = {key: {kind: f"{share:.2f}" for kind, share in cell["kinds"].items()} for key, cell in _cells(family, "agreement")}
    return by_temperature("prompts", found)


def ranks(family: Document) -> str:
    """Where the smaller model is wrong: how often each of its runner-ups is right."""
    found = {
        key: {f"runner-up {rank}": f"{share:.2f}" for rank, share in enumerate(cell["ranks"], 1)}
        for key, cell in _cells(family, "agreement")
    }
    return by_temperature("", found)


def ways(family: Document) -> str:
    """Every way to draft with the pair."""
    found = {key: {f"`{name}`": mode(cell) for name, cell in cells.items()} for key, cells in _cells(family, "modes")}
    return by_temperature("mode", found)


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
        [mode, f"{one['measured_ms']:.1f}", f"{one['predicted_ms']:.1f}", f"{one['ratio']:.3f}"]
        for mode, one in document["pipespec"].items()
    ]
    return rows(("mode", "measured, ms a token", "predicted", "predicted over measured"), lines)


def chain(document: Document) -> str:
    """What this chain would give with PipeSpec's models: speed over 70B alone, by what passes cost."""
    modes = list(next(iter(document["chain"].values())))
    lines = [[costs, *(f"{found[mode]['over_alone']:.2f}" for mode in modes[1:])] for costs, found in document["chain"].items()]
    return rows(("passes", *modes[1:]), lines)


def llama(document: Document) -> str:
    """Words within a sentence: what 1B alone and both drafts give 70B on H100s."""
    found = next(modes for costs, modes in document["chain"].items() if "H100" in costs)
    tiny, both = (found[mode]["over_alone"] for mode in ("1B → 70B", "1B → 8B → 70B"))
    return f"{tiny:.2f} times the speed of 70B, and both {both:.2f}"


def shipped() -> str:
    """Agreement of the models that ship with their full model, from their model cards."""
    lines = []
    for name in ("tiny", "medium"):
        card = (CARDS / name / "README.md").read_text(encoding="utf-8")
        known = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))
        numbers = [f"{float(known[label]):.2f}" for label in TEMPERATURES.values()]
        lines.append([f"`{name}`", known["parameters"], known["share of the teacher's weights that a pass reads"], *numbers])
    return rows(
        ("model", "parameters", "share of a pass's weights", *(f"temperature {label}" for label in TEMPERATURES.values())),
        lines,
    )


def drafters(document: Document) -> str:
    """Every drafter alone, and the planner's choice: speed over the full model alone, and tokens of one of its passes."""
    found = {
        key: {
            name: f"{one[key]['speedup']:.2f}, {one[key]['accepted_len']:.2f}"
            for name, one in document["head"]["drafters"].items()
        }
        for key in TEMPERATURES
    }
    return by_temperature("mode", found)


def rules(document: Document) -> str:
    """What each rule accepts of the same drafts: the first guess, and tokens of a window."""
    found = document["temperatures"]
    names = next(iter(found.values()))["rules"]
    cells = {name: [of["rules"][name] for of in found.values()] for name in names}
    lines = [
        [name, *(f"{one['first']:.2f}, {one['accepted']:.2f} ± {one['error']:.2f}" for one in line)]
        for name, line in cells.items()
    ]
    return rows(("rule", *(f"temperature {float(key):g}" for key in found)), lines)


def aligned(document: Document) -> str:
    """What a change of traffic cost drafters, and what they have learnt back."""
    lines = []
    for name, found in document["learning"].items():
        shares = [f"{found[which][when]:.2f}" for which in ("old", "new") for when in ("before", "after")]
        back = "-" if found["recovered"] is None else f"{found['recovered']:.0%}"
        lines.append([f"`{name}`", *shares, back, f"{found['course'][-1][0]:.0f}"])
    columns = ("chats", "chats, after", "Java", "Java, after", "recovered", "seconds")
    return rows(("drafter", *columns), lines) + "".join(course(name, found) for name, found in document["learning"].items())


def course(name: str, found: Document) -> str:
    """Agreement of a drafter before the change of traffic, right after it, and with the weights of each round, as a chart."""
    seconds, new, _ = zip(*found["course"], strict=True)
    marks = ["chats", "change to Java", *(f"new weights, {second:.0f} s" for second in seconds[1:])]
    axis, shares = ", ".join(f'"{mark}"' for mark in marks), ", ".join(map(str, (round(found["old"]["before"], 3), *new)))
    lines = (f'title "{name}"', f"x-axis [{axis}]", 'y-axis "agreement" 0 --> 1', f"line [{shares}]")
    return "\n```mermaid\nxychart-beta\n" + "".join(f"    {line}\n" for line in lines) + "```\n"


SECTIONS: Sequence[tuple[str, str, str, str, Callable[[Document], str]]] = (  # title, document, command, what, table
    (
        "One request at a time",
        "peers",
        "make bench-peers",
        "Tokens per second, all engines in turns on the same weights and threads. In brackets: over the full model alone.",
        one,
    ),
    (
        "Every mode, one request at a time",
        "peers",
        "make bench-peers",
        "The same run: tokens per second, and over the same engine alone. Draft tiers (`tiny`, `medium`) share two cores with "
        "the full model here. `cascade_lookup` is gone since.",
        modes,
    ),
    (
        "Several requests at once",
        "never_slower",
        "make bench-never-slower",
        "Tokens per second of all requests together: what the planner chooses over the full model alone, in turns, with the "
        "error.",
        loads,
    ),
    ("Over HTTP", "peers", "make bench-peers", "Tokens per second in bfloat16, `vllm bench serve` as the client.", served),
    (
        "A tier on vLLM",
        "vllm",
        "make bench-vllm",
        "A full tier whose passes are vLLM's, beside vLLM's own server, float32, temperature 0. Ratios of tokens per second.",
        engine,
    ),
    (
        "Beside the model",
        "loop",
        "make bench-loop",
        "Milliseconds of a tier's own work for each pass: from the end of a pass to the start of the next, + what runs while "
        "the model works.",
        loop,
    ),
    (
        "A router",
        "router",
        "make bench-router",
        "What a router takes of a core for 1,000 tokens a second, before a full tier that takes no time. All streams begin "
        "at once, and each gets a token every 32 or 64 ms.",
        router,
    ),
    (
        "A tier on vLLM, on a GPU",
        "gpu",
        "python -m benchmarks.gpu",
        "Milliseconds of a pass of one row after 200 positions, and how many greedy tokens with drafts, half of them wrong, "
        "are those without.",
        accelerated,
    ),
    (
        "Three tiers on one GPU",
        "gpu",
        "python -m benchmarks.gpu",
        "Tokens per second of the full model at Llama 8B's shapes, bfloat16, temperature 0.",
        one_gpu,
    ),
    (
        "A device for each replica, emulated",
        "cluster",
        "make bench-cluster",
        "Three tiers, and what the planner chooses, over the full model alone. Passes take what those of Qwen3 0.6B, 4B and "
        "32B would take on an H100 each; texts and agreement are those of the models that ship.",
        devices,
    ),
    (
        "What an emulated pass takes",
        "cluster",
        "make bench-cluster",
        "Milliseconds by tokens of the pass, computed from weights, bandwidth and launches (`cascade/simulation/trio.py`).",
        trio,
    ),
    (
        "One request on emulated devices",
        "cluster",
        "make bench-cluster",
        "Every mode over the full model alone, as measured and as the simulator has it.",
        emulated,
    ),
    (
        "A trio for which three tiers pay, emulated",
        "cluster",
        "python -m benchmarks.cluster --only map",
        "Passes of 80, 20 and 2 ms, drafts that agree with the full model in 0.70 and 0.88 of positions, one request at a "
        "time: served, and as the simulator has it. Models are toys.",
        mapped,
    ),
    (
        "The simulator beside published speeds",
        "published",
        "python -m benchmarks.published",
        "PipeSpec's Llama 1B, 8B and 70B on HumanEval (arXiv 2505.01572). Given are its passes' milliseconds, and which drafts "
        "were right in its lockstep runs; nothing is fitted to the speeds.",
        pipespec,
    ),
    (
        "This chain with those models",
        "published",
        "python -m benchmarks.published",
        "Simulated, one request at a time: speed over 70B alone.",
        chain,
    ),
    (
        "Drafters",
        "drafters",
        "make bench-drafters",
        "Speed over the full model alone, the median of six kinds of prompts, and tokens per pass of the full model. How far "
        "`alone, again` is from 1 says how well speeds are known. `lookup` is gone since.",
        drafters,
    ),
    (
        "Rules for accepting guesses",
        "rules",
        "python -m benchmarks.rules",
        "Share of first guesses that are accepted, and tokens accepted of a window of four, by each rule on the same drafts. "
        "Computed from logits, except *drawn*: what own tokens with the noise of one seed accept. The error is that of "
        "answers, which all rules share.",
        rules,
    ),
    (
        "Text drafters on a device of its own",
        "without_drafts",
        "python -m benchmarks.without_drafts",
        "SmolLM2-135M-Instruct in virtual time, with passes that take what those of Qwen3 32B take on an H100, where 239 "
        "tokens cost as much as one. Speed over the model alone, one request at a time; drafters know no other answer.",
        text_drafters,
    ),
    (
        "A published pair: agreement",
        "family",
        "make bench-family",
        "Share of the positions of answers of 1.5B at which 0.5B says the same token: eight problems of HumanEval and a chat "
        "of each of six kinds, 64 tokens of each answer. Weights were published in 4 bits.",
        agreeing,
    ),
    (
        "A published pair: runner-ups",
        "family",
        "make bench-family",
        "Where 0.5B says another token than 1.5B: how often each of its runner-ups is the right one.",
        ranks,
    ),
    (
        "A published pair: speed",
        "family",
        "make bench-family",
        "HumanEval, one request at a time: tokens per second, and over 1.5B alone. `tiny` is 0.5B on the same cores, `suffix` "
        "drafts in both tiers.",
        ways,
    ),
    (
        "A published pair: beside other engines",
        "family",
        "make bench-family",
        "The same problems and weights in vLLM's build for CPUs and in llama.cpp, each with its own drafting. Two contests: "
        "the first two modes stand in each.",
        beside,
    ),
    (
        "Drafters that follow the traffic",
        "align",
        "make bench-align",
        "Share of positions of held-out answers at which a drafter says what its verifier says, before and after it has learnt "
        "from files in Java on one core. *Recovered*: of what the change from chats in English to Java had cost.",
        aligned,
    ),
)


def page() -> str:
    """`docs/figures.md`."""
    parts = [
        "# Figures\n",
        "Written by `make figures` from `benchmarks/results/*.json`. Ratios are of one run, in turns. [What targets compare]"
        "(howto/benchmark.md#this-projects-own-figures).\n",
    ]
    for title, name, command, what, table in SECTIONS:
        document = load(name)
        if document and (figures := table(document)):
            # the parts of the cluster's document have dates and processors of their own
            parts_of: dict[Callable[[Document], str], str] = {emulated: "one", trio: "one", devices: "scale", mapped: "map"}
            part = parts_of.get(table, "")
            date = document.get("dates", {}).get(part, document["date"])
            processor = document.get("processors", {}).get(part, document["processor"])
            source = f"`{document.get('command', command)}`, {date}, {processor}, {document.get('model', MODEL)}."
            parts.append(f"## {title}\n\n{what}\n\n{figures}\n{source}\n")
    ships = "Share of held-out positions at which they say the same token as SmolLM2-135M-Instruct, by temperature of the text."
    source = "`cascade distill`, from the model cards in `cascade/family/weights`."
    parts.append(f"## The models that ship\n\n{ships}\n\n{shipped()}\n{source}\n")
    return "\n".join(parts)


def filled(text: str) -> str:
    """A page with its tables as the documents have them."""
    tables: dict[str, Callable[[], str]] = {
        "one": lambda: one(load("peers")),
        "served": lambda: served(load("peers")),
        "devices": lambda: devices(load("cluster")),
        "span": lambda: span(load("never_slower")),
        "pair": lambda: pair(load("family")),
        "placed": lambda: placed(load("cluster")),
        "map": lambda: third_tier(load("map")),
        "llama": lambda: llama(load("published")),
    }
    return MARKED.sub(lambda found: f"{found[1]}{tables[found[2]]()}{found[3]}", text)


def main() -> None:
    for marked in (README, PLAN):
        marked.write_text(filled(marked.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
