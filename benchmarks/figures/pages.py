"""The pages that show figures: what `docs/figures.md` holds, and the marked places of others."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.figures import tables

ROOT = Path(__file__).parents[2]
README, PAGE, PLAN = ROOT / "README.md", ROOT / "docs" / "figures.md", ROOT / "docs" / "howto" / "plan.md"
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n?).*?(<!-- end -->)", re.DOTALL)
MODEL = "SmolLM2-135M-Instruct"  # of documents that name no other

SECTIONS: Sequence[tuple[str, str, str, str, Callable[[tables.Document], str]]] = (  # title, document, command, what, table
    (
        "One request at a time",
        "peers",
        "make bench-peers",
        "Tokens per second, all engines in turns on the same weights and threads. In brackets: over the full model alone.",
        tables.one,
    ),
    (
        "Every mode, one request at a time",
        "peers",
        "make bench-peers",
        "The same run: tokens per second, and over the same engine alone. Draft tiers (`tiny`, `medium`) share two cores with "
        "the full model here. `cascade_lookup` is gone since.",
        tables.modes,
    ),
    (
        "Several requests at once",
        "never_slower",
        "make bench-never-slower",
        "Tokens per second of all requests together: what the planner chooses over the full model alone, in turns, with the "
        "error.",
        tables.loads,
    ),
    (
        "Over HTTP",
        "peers",
        "make bench-peers",
        "Tokens per second in bfloat16, `vllm bench serve` as the client.",
        tables.served,
    ),
    (
        "A tier on vLLM",
        "vllm",
        "make bench-vllm",
        "A full tier whose passes are vLLM's, beside vLLM's own server, float32, temperature 0. Ratios of tokens per second.",
        tables.engine,
    ),
    (
        "Beside the model",
        "loop",
        "make bench-loop",
        "Milliseconds of a tier's own work for each pass: from the end of a pass to the start of the next, + what runs while "
        "the model works.",
        tables.loop,
    ),
    (
        "A router",
        "router",
        "make bench-router",
        "What a router takes of a core for 1,000 tokens a second, before a full tier that takes no time. All streams begin "
        "at once, and each gets a token every 32 or 64 ms.",
        tables.router,
    ),
    (
        "A tier on vLLM, on a GPU",
        "gpu",
        "python -m benchmarks.gpu",
        "Milliseconds of a pass of one row after 200 positions, and how many greedy tokens with drafts, half of them wrong, "
        "are those without.",
        tables.accelerated,
    ),
    (
        "Three tiers on one GPU",
        "gpu",
        "python -m benchmarks.gpu",
        "Tokens per second of the full model at Llama 8B's shapes, bfloat16, temperature 0.",
        tables.one_gpu,
    ),
    (
        "A device for each replica, emulated",
        "cluster",
        "make bench-cluster",
        "Three tiers, and what the planner chooses, over the full model alone. Passes take what those of Qwen3 0.6B, 4B and "
        "32B would take on an H100 each; texts and agreement are those of the models that ship.",
        tables.devices,
    ),
    (
        "What an emulated pass takes",
        "cluster",
        "make bench-cluster",
        "Milliseconds by tokens of the pass, computed from weights, bandwidth and launches (`cascade/simulation/costs.py`).",
        tables.trio,
    ),
    (
        "One request on emulated devices",
        "cluster",
        "make bench-cluster",
        "Every mode over the full model alone, as measured and as the simulator has it.",
        tables.emulated,
    ),
    (
        "A trio for which three tiers pay, emulated",
        "cluster",
        "python -m benchmarks.cluster --only map",
        "Passes of 80, 20 and 2 ms, drafts that agree with the full model in 0.70 and 0.88 of positions, one request at a "
        "time: served, and as the simulator has it. Models are toys.",
        tables.mapped,
    ),
    (
        "The simulator beside published speeds",
        "published",
        "python -m benchmarks.published",
        "PipeSpec's Llama 1B, 8B and 70B on HumanEval (arXiv 2505.01572). Given are its passes' milliseconds, and which drafts "
        "were right in its lockstep runs; nothing is fitted to the speeds.",
        tables.pipespec,
    ),
    (
        "This chain with those models",
        "published",
        "python -m benchmarks.published",
        "Simulated, one request at a time: speed over 70B alone.",
        tables.chain,
    ),
    (
        "Drafters",
        "drafters",
        "make bench-drafters",
        "Speed over the full model alone, the median of six kinds of prompts, and tokens per pass of the full model. How far "
        "`alone, again` is from 1 says how well speeds are known. `lookup` is gone since.",
        tables.drafters,
    ),
    (
        "Rules for accepting guesses",
        "rules",
        "python -m benchmarks.rules",
        "Share of first guesses that are accepted, and tokens accepted of a window of four, by each rule on the same drafts. "
        "Computed from logits, except *drawn*: what own tokens with the noise of one seed accept. The error is that of "
        "answers, which all rules share.",
        tables.rules,
    ),
    (
        "Text drafters on a device of its own",
        "without_drafts",
        "python -m benchmarks.without_drafts",
        "SmolLM2-135M-Instruct in virtual time, with passes that take what those of Qwen3 32B take on an H100, where 239 "
        "tokens cost as much as one. Speed over the model alone, one request at a time; drafters know no other answer.",
        tables.text_drafters,
    ),
    (
        "A published pair: agreement",
        "family",
        "make bench-family",
        "Share of the positions of answers of 1.5B at which 0.5B says the same token: eight problems of HumanEval and a chat "
        "of each of six kinds, 64 tokens of each answer. Weights were published in 4 bits.",
        tables.agreeing,
    ),
    (
        "A published pair: runner-ups",
        "family",
        "make bench-family",
        "Where 0.5B says another token than 1.5B: how often each of its runner-ups is the right one.",
        tables.ranks,
    ),
    (
        "A published pair: a device for each",
        "family",
        "make bench-family",
        "Simulated along the same answers, one request at a time, where each model has a device of its own and its passes cost "
        "so much: speed over 1.5B alone, and the share of corrections after which a guess was there already.",
        tables.apart,
    ),
    (
        "A published pair: a device for each, served",
        "cluster",
        "python -m benchmarks.cluster --only pair",
        "The same answers served by emulated devices, one request at a time, in the time of Qwen3 32B and 0.6B on an H100 "
        "each: over 1.5B alone, and as the simulator has it.",
        tables.recorded,
    ),
    (
        "A published pair: speed",
        "family",
        "make bench-family",
        "HumanEval, one request at a time: tokens per second, and over 1.5B alone. `tiny` is 0.5B on the same cores, `suffix` "
        "drafts in both tiers.",
        tables.ways,
    ),
    (
        "A published pair: beside other engines",
        "family",
        "make bench-family",
        "The same problems and weights in vLLM's build for CPUs and in llama.cpp, each with its own drafting. Two contests: "
        "the first two modes stand in each.",
        tables.beside,
    ),
    (
        "A published pair: long prompts",
        "family",
        "python -m benchmarks.family --only long",
        "Chats that begin with other problems of HumanEval, temperature 0, 48 tokens of each answer, one request at a time: "
        "tokens per second after the first one, and seconds until it. Answers begin with a copy of the problem, which "
        "`suffix` drafts.",
        tables.long_prompts,
    ),
    (
        "Drafters that follow the traffic",
        "align",
        "make bench-align",
        "Share of positions of held-out answers at which a drafter says what its verifier says, before and after it has learnt "
        "from files in Java on one core. *Recovered*: of what the change from chats in English to Java had cost.",
        tables.aligned,
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
        document = tables.load(name)
        if document and (figures := table(document)):
            # the parts of the cluster's document have dates and processors of their own
            parts_of: dict[Callable[[tables.Document], str], str] = {
                tables.emulated: "one",
                tables.trio: "one",
                tables.devices: "scale",
                tables.mapped: "map",
                tables.recorded: "pair",
            }
            part = parts_of.get(table, "")
            date = document.get("dates", {}).get(part, document["date"])
            processor = document.get("processors", {}).get(part, document["processor"])
            model = document.get(part, document).get("model", MODEL)
            source = f"`{document.get('command', command)}`, {date}, {processor}, {model}."
            parts.append(f"## {title}\n\n{what}\n\n{figures}\n{source}\n")
    ships = "Share of held-out positions at which they say the same token as SmolLM2-135M-Instruct, by temperature of the text."
    source = "`cascade distill`, from the model cards in `cascade/family/weights`."
    parts.append(f"## The models that ship\n\n{ships}\n\n{tables.shipped()}\n{source}\n")
    return "\n".join(parts)


def filled(text: str) -> str:
    """A page with its tables as the documents have them."""
    made: dict[str, Callable[[], str]] = {
        "one": lambda: tables.one(tables.load("peers")),
        "served": lambda: tables.served(tables.load("peers")),
        "devices": lambda: tables.devices(tables.load("cluster")),
        "span": lambda: tables.span(tables.load("never_slower")),
        "pair": lambda: tables.pair(tables.load("family")),
        "contests": lambda: tables.contests(tables.load("family")),
        "placed": lambda: tables.placed(tables.load("cluster")),
        "map": lambda: tables.third_tier(tables.load("map")),
        "llama": lambda: tables.llama(tables.load("published")),
    }
    return MARKED.sub(lambda found: f"{found[1]}{made[found[2]]()}{found[3]}", text)
