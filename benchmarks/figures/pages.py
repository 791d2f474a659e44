"""The pages that show figures, and what stands in their marked places."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.figures import picture, tables

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "figures.md", ROOT / "docs" / "howto" / "plan.md")
PICTURE = ROOT / "docs" / "map.svg"
MARKED = re.compile(r"(<!-- figures: (\w+)((?: \w+)*) -->\n?).*?(<!-- end -->)", re.DOTALL)
MODEL = "SmolLM2-135M-Instruct"  # of documents that name no other
NOTHING = "not measured"  # in a place without a document

# by the name of a place: what makes it, of which document
TABLES: Mapping[str, tuple[Callable[[tables.Document], str], str]] = {
    "one": (tables.single, "peers"),
    "modes": (tables.modes, "peers"),
    "served": (tables.served, "peers"),
    "loads": (tables.loads, "never_slower"),
    "span": (tables.span, "never_slower"),
    "engine": (tables.engine, "vllm"),
    "loop": (tables.loop, "loop"),
    "router": (tables.router, "router"),
    "accelerated": (tables.accelerated, "gpu"),
    "one_gpu": (tables.one_gpu, "gpu"),
    "devices": (tables.devices, "cluster"),
    "trio": (tables.trio, "cluster"),
    "emulated": (tables.emulated, "cluster"),
    "mapped": (tables.mapped, "cluster"),
    "recorded": (tables.recorded, "cluster"),
    "placed": (tables.placed, "cluster"),
    "map": (tables.third_tier, "map"),
    "pipespec": (tables.pipespec, "published"),
    "chain": (tables.chain, "published"),
    "llama": (tables.llama, "published"),
    "drafters": (tables.drafters, "drafters"),
    "rules": (tables.rules, "rules"),
    "text_drafters": (tables.text_drafters, "without_drafts"),
    "agreeing": (tables.agreeing, "family"),
    "ranks": (tables.ranks, "family"),
    "apart": (tables.apart, "family"),
    "ways": (tables.ways, "family"),
    "beside": (tables.beside, "family"),
    "contests": (tables.contests, "family"),
    "long_prompts": (tables.long_prompts, "family"),
    "pair": (tables.pair, "family"),
    "aligned": (tables.aligned, "align"),
}


def made(name: str, *words: str) -> str:
    """What stands in a place of this name: a table, or words within a sentence.

    ``taken DOCUMENT`` or ``taken DOCUMENT PART`` is when, where and of which model; ``command DOCUMENT`` by which command.
    """
    if name == "shipped":
        return tables.shipped()
    if name in TABLES:
        table, source = TABLES[name]
        document = tables.load(source)
        return (table(document) if document else "") or f"{NOTHING}\n"
    document, part = tables.load(words[0]), "".join(words[1:])
    if not document or (part and part not in document):
        return NOTHING
    if name == "command":
        return f"`{document['command']}`"
    date = document.get("dates", {}).get(part, document["date"])  # parts of the cluster's document have their own
    processor = document.get("processors", {}).get(part, document["processor"])
    model = document.get(part, {}).get("model") or document.get("model", MODEL)
    return f"{date}, {processor}, {model}"


def filled(text: str) -> str:
    """A page with its places as the documents have them."""
    return MARKED.sub(lambda place: f"{place[1]}{made(place[2], *place[3].split())}{place[4]}", text)


def drawn() -> str:
    """What stands in `PICTURE`."""
    return picture.third_tier(tables.load("map"))


def unshown() -> set[str]:
    """Names of figures that are measured, and that no page shows."""
    shown = {place[2] for page in PAGES for place in MARKED.finditer(page.read_text(encoding="utf-8"))}
    return {name for name in TABLES.keys() - shown if not made(name).startswith(NOTHING)}
