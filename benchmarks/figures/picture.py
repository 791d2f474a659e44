"""The map of where a third tier pays, as a picture."""

from collections.abc import Mapping, Sequence

from benchmarks.figures.tables import Document
from cascade.simulation.plan import PLANNER

MATTERS = 1.03  # smaller gains are not worth a device
WIDTH, HEIGHT, LEFT, TOP, APART = 54, 40, 74, 62, 40  # of cells, and what lies around and between the panels
GREY, BLUE = "#e6e6e6", "#a6cbe6"
LIGHT, STRONG = (255, 224, 170), (240, 120, 40)  # where three tiers gain next to nothing over the best pair, and half as much


def third_tier(document: Document) -> str:
    """An SVG of a panel for each load: columns by agreement of the medium model, rows by its cost."""
    cells = document["cells"]
    loads, costs, shares = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("load", "cost", "agreement"))
    panel = LEFT + WIDTH * len(shares)
    size = APART + panel * len(loads), TOP + HEIGHT * len(costs) + 92
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" font-family="sans-serif" '
        'font-size="12">',
        "<title>Where a third tier pays, by agreement and cost of the medium model</title>",
        f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>',
    ]
    for number, load in enumerate(loads):
        left = LEFT + (panel + APART // 2) * number
        middle = left + WIDTH * len(shares) / 2
        parts.append(_text(middle, 24, f"{load} request{'s' if load > 1 else ''} at once", "bold"))
        parts.append(_text(middle, TOP + HEIGHT * len(costs) + 36, "agreement of the medium model with the full one"))
        for row, cost in enumerate(costs):
            parts.append(_text(left - 22, TOP + HEIGHT * row + 24, f"{cost:g}"))
            for column, share in enumerate(shares):
                [over] = [c["over_alone"] for c in cells if (c["load"], c["cost"], c["agreement"]) == (load, cost, share)]
                parts += _cell(left + WIDTH * column, TOP + HEIGHT * row, over)
        for column, share in enumerate(shares):
            parts.append(_text(left + WIDTH * (column + 0.5), TOP + HEIGHT * len(costs) + 16, f"{share:g}"))
    parts.append(_text(8, TOP - 12, "time of a pass, medium model over full model", anchor="start"))
    parts += _legend(TOP + HEIGHT * len(costs) + 60)
    return "\n".join([*parts, "</svg>", ""])


def best(over: Mapping[str, float]) -> tuple[str, float, float]:
    """What is best, its speed over the full model alone, and that of three tiers over the best pair."""
    alone, *pairs, three = (mode for mode in over if mode != PLANNER)
    pair = max(pairs, key=lambda mode: over[mode])
    gain = over[three] / over[pair]
    if gain >= MATTERS and over[three] >= MATTERS:
        return "three", over[three], gain
    return (pair.split()[0], over[pair], gain) if over[pair] >= MATTERS else (alone, 1.0, gain)


def _cell(x: float, y: float, over: Mapping[str, float]) -> Sequence[str]:
    which, speed, gain = best(over)
    share = min(1.0, max(0.0, gain - 1) / 0.5)
    mixed = "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(LIGHT, STRONG, strict=True))
    colour = {"three": mixed, "alone": GREY}.get(which, BLUE)
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH - 2}" height="{HEIGHT - 2}" fill="{colour}"/>',
        _text(x + WIDTH / 2 - 1, y + 17, f"{speed:.1f}", "bold"),
        _text(x + WIDTH / 2 - 1, y + 32, f"+{gain - 1:.0%}" if which == "three" else which),
    )


def _legend(y: float) -> Sequence[str]:
    rows = ((GREY, "the full model alone"), (BLUE, "a pair, with this model"), ("#f8ac69", "three tiers, over the best pair"))
    parts = []
    for number, (colour, words) in enumerate(rows):
        x = LEFT + 220 * number
        parts.append(f'<rect x="{x}" y="{y}" width="16" height="16" fill="{colour}"/>')
        parts.append(_text(x + 22, y + 13, words, anchor="start"))
    return parts


def _text(x: float, y: float, words: str, weight: str = "normal", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-weight="{weight}" text-anchor="{anchor}">{words}</text>'
