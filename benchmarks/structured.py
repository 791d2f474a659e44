"""Structured output against free text, through the running server: validity, acceptance and speed, with drafts and without.

    python -m benchmarks.structured

The family on this machine's CPU. Every kind of text is asked for by the same chats and seeds, the full model alone and the
cascade with a fixed drafter in turns. The last line is one JSON document.
"""

import json
import time
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.asked import chat_ids, stamp
from cascade import family
from cascade.bench.measure import stranger
from cascade.client import Client
from cascade.engine.tokenizer import Tokenizer
from cascade.params import SamplingParams, Speculation, Structured
from deployments.ops.launch.server import Server

RESULTS = Path(__file__).parent / "results"
PROMPTS = (
    "Describe a user of a web shop as JSON: name, age, whether an administrator, tags, mail address.",
    "Write a JSON record for Ada Lovelace, who is 36 and likes mathematics.",
    "Make up a customer and answer in JSON only.",
    "Turn this into JSON: Bob Miller, 52 years old, administrator, tags night shift and first aid, bob@example.org.",
)
SEEDS = (1, 2)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "admin": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "mail": {"type": "string", "maxLength": 24},
    },
    "required": ["name", "age", "admin", "tags", "mail"],
    "additionalProperties": False,
}
KINDS = {"free": None, "schema": Structured(json_schema=SCHEMA)}
MODES = {"alone": Speculation("off"), "drafted": Speculation(tiers=("tiny",))}


def measure(client: Client, temperature: float) -> dict[str, Any]:
    """Figures of each kind of text."""
    totals: dict[tuple[str, str], list[float]] = {(kind, mode): [0, 0.0, 0, 0, 0] for kind in KINDS for mode in MODES}
    valid = asked = 0
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])
    for seed in (0, *SEEDS):  # the first one warms up
        for prompt in (chat_ids(tokenizer, text) for text in PROMPTS):
            for kind, structured in KINDS.items():
                params = SamplingParams(max_tokens=160, temperature=temperature, seed=seed, structured=structured)
                for mode, speculation in MODES.items():
                    begin = time.perf_counter()
                    completion = client.generate(prompt, params, speculation, stranger())
                    seconds = time.perf_counter() - begin
                    if not seed:
                        continue
                    edges = completion.stats.edges
                    stats = completion.stats
                    new = [stats.completion_tokens, seconds, stats.full_passes]
                    new += [sum(edge.proposed for edge in edges), sum(edge.accepted for edge in edges)]
                    totals[kind, mode] = [a + b for a, b in zip(totals[kind, mode], new, strict=True)]
                    if structured is not None:
                        asked += 1
                        valid += completion.finish_reason == "stop" and _valid(completion.text)
    found: dict[str, Any] = {"asked": asked, "valid": valid}
    for (kind, mode), (tokens, seconds, passes, proposed, accepted) in totals.items():
        found[f"{kind}, {mode}"] = {
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens_per_full_pass": round(tokens / passes, 2),
            "acceptance": round(accepted / proposed, 3) if proposed else None,
        }
    return found


def _valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    with Server.start(None, port=0) as server, Client(server.address) as client:
        document: dict[str, Any] = {f"temperature {temperature}": measure(client, temperature) for temperature in (0.0, 0.7)}
    document |= stamp()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "structured.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
