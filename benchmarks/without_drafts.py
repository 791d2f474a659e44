"""Text drafters on a device of its own for the full model, where a pass of many tokens costs as much as one.

    python -m benchmarks.without_drafts

SmolLM2-135M-Instruct writes the answers. Time is virtual: a pass takes what one of Qwen3 32B takes on an H100
(`cascade.simulation.costs`). So nothing depends on this machine, and no draft model is needed. Every answer is the first that
its drafters see. All modes must give the same text, else the run fails. The last line is one JSON document.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.document import console, finish, parsed, parser, stamp, timed
from benchmarks.prompts import by_category
from cascade import family
from cascade.agreement import chat_ids
from cascade.drafters import DrafterSpec, make
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.params import SamplingParams
from cascade.simulation.costs import QWEN3
from cascade.simulation.scenario import Request, Scenario, SimTier
from cascade.simulation.simulate import simulate

MODES: dict[str, tuple[str, ...]] = {
    "alone": (),
    "lookahead": ("lookahead",),
    "suffix": ("suffix",),
    "suffix + lookahead": ("suffix", "lookahead"),
}
TEMPERATURES = {"t0": 0.0, "t0.7": 0.7}


def measure(prompts: int, tokens: int) -> dict[str, Any]:
    """By temperature and mode: speed over alone and tokens a pass, of all and by category; and whether texts are the same."""
    source, cost = family.paths()[-1], QWEN3[-1]
    tokenizer, figures = Tokenizer.from_pretrained(source), {}
    model = Model.from_pretrained(source, dtype="float32")
    try:
        for key, temperature in TEMPERATURES.items():
            seconds: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
            passes = dict.fromkeys(MODES, 0)
            texts: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(MODES, ())
            for seed, prompt in enumerate(by_category(prompts)):
                params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)
                request = Request(tuple(chat_ids(tokenizer, prompt.text)), params, tokenizer.end_ids)
                for mode, kinds in MODES.items():
                    drafters = tuple(make([DrafterSpec(kind) for kind in kinds], kinds, None))
                    tier = SimTier("full", model, cost.predict, drafters=drafters)
                    outcome = simulate(Scenario((tier,), (request,)))
                    took = outcome.finish_s[0] - outcome.token_s[0]
                    seconds[mode][prompt.category] = seconds[mode].get(prompt.category, 0.0) + took
                    passes[mode] += outcome.passes[-1] - 1
                    texts[mode] += outcome.texts
            figures[key] = {
                "same_text": len(set(texts.values())) == 1,
                "modes": _ratios(seconds, passes, sum(map(len, texts["alone"])) - len(texts["alone"])),
            }
            console.print(key, figures[key])
    finally:
        model.close()
    return figures


def _ratios(seconds: dict[str, dict[str, float]], passes: dict[str, int], tokens: int) -> dict[str, Any]:
    alone = seconds["alone"]
    return {
        mode: {
            "over_alone": round(sum(alone.values()) / sum(took.values()), 3),
            "tokens_a_pass": round(tokens / passes[mode], 3),
            "by_category": {kind: round(alone[kind] / took[kind], 2) for kind in took},
        }
        for mode, took in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("without_drafts", "Text drafters on a device of its own, in virtual time."), arguments)
    figures = timed("Text drafters", lambda: measure(*((1, 16) if chosen.quick else (1, 64))))
    line = {key: {mode: cell["over_alone"] for mode, cell in at["modes"].items()} for key, at in figures.items()}
    finish({"head": line} | figures | stamp(), line, chosen.results)


if __name__ == "__main__":
    main()
