"""What the configuration of a drafter of blocks says, in the ways in which such drafters are published.

- DFlash (z-lab): ``dflash_config.{target_layer_ids, mask_token_id}``, ``block_size`` there or at the top level. Ids are of
  layers whose outputs are read. The first token of a block is known: the others are guesses.
- DSpark (DeepSpec, SpecForge): the same keys, some or all at the top level. Each place of a block guesses the token behind it.
- ``speculators``: sizes of layers in ``transformer_layer_config``, ``aux_hidden_state_layer_ids`` that count as Transformers
  does, and ``sample_from_anchor`` for what a place guesses.

Layers may slide (``layer_types``, ``sliding_window``, ``dflash_config.{use_swa, swa_window_size, causal}``): as vLLM takes
them, those that ``layer_types`` names see no later place of their block, unless something says otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cascade.engine.heads.formats import Checkpoint
from cascade.scorer import MAX_FORKED

SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a place of a block sees in a layer."""

    causal: bool = False  # of its block, those before it and itself alone
    window: int | None = None  # positions that slide, if they do: its own and those before it, or those before the block


@dataclass(frozen=True, slots=True)
class Layout:
    """How blocks are laid out."""

    size: int  # places, of which the first has the last token of the text
    mask: int  # token id of the others
    shifted: bool  # a place guesses the token behind it, and not its own
    seen: tuple[Seen, ...]  # by layer

    @property
    def guesses(self) -> int:
        """Of a block."""
        return self.size if self.shifted else self.size - 1


def layout_of(checkpoint: Checkpoint, num_layers: int, *, shifted: bool) -> Layout:
    """Of a drafter with so many layers; ``shifted`` is what its kind does where its configuration does not say it.

    Raises `ModelError` if the configuration lacks something, or names what nobody can run.
    """
    config, inner = checkpoint.config, _inner(checkpoint.config)
    size, mask = (_number(checkpoint, name) for name in ("block_size", "mask_token_id"))
    if not 2 <= size <= MAX_FORKED:
        raise checkpoint.wrong(f"its block_size is {size}: it must be 2 to {MAX_FORKED}")
    told = _first("sample_from_anchor", config, inner)
    if told is None and (bonus := _first("dspark_bonus_anchor", config, inner)) is not None:
        told = not bonus
    return Layout(size, mask, shifted if told is None else bool(told), _seen(checkpoint, num_layers))


def reads_of(checkpoint: Checkpoint, num_own: int, num_layers: int) -> tuple[int, ...]:
    """Hidden states that a drafter with ``num_own`` layers reads of a model with ``num_layers``, as Transformers counts them.

    Raises `ModelError` if the model has none of them, or another number of layers than the drafter was made for.
    """
    config = checkpoint.config
    if (made_for := config.get("num_target_layers")) not in (None, num_layers):
        raise checkpoint.wrong(f"it was made for a model of {made_for} layers, and the model has {num_layers}")
    ids = config.get("aux_hidden_state_layer_ids")
    if ids is None:
        outputs = _first("target_layer_ids", config, _inner(config))
        ids = [layer + 1 for layer in (_usual(num_layers, num_own) if outputs is None else outputs)]
    if not ids or not all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in ids):
        raise checkpoint.wrong(f"it reads hidden states {', '.join(map(str, ids))}, and the model has {num_layers} layers")
    return tuple(ids)


def _usual(num_layers: int, number: int) -> list[int]:
    """Layers whose outputs DFlash reads if nobody names them: evenly from the second one on."""
    if number == 1:
        return [num_layers // 2]
    return [round(1 + place * (num_layers - 4) / (number - 1)) for place in range(number)]


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("dflash_config") or {}


def _first(name: str, *parts: Mapping[str, Any]) -> Any:
    return next((part[name] for part in parts if part.get(name) is not None), None)


def _number(checkpoint: Checkpoint, name: str) -> int:
    found = _first(name, checkpoint.config, _inner(checkpoint.config))
    if not isinstance(found, int):
        raise checkpoint.wrong(f"its config.json does not name {name}")
    return found


def _seen(checkpoint: Checkpoint, num_layers: int) -> tuple[Seen, ...]:
    config, inner = checkpoint.config, _inner(checkpoint.config)
    own: Mapping[str, Any] = config.get("transformer_layer_config") or config
    types: Sequence[str] = own.get("layer_types") or ()
    named = SLIDING in types
    if named and len(types) < num_layers:
        raise checkpoint.wrong(f"its layer_types are {len(types)}, and it has {num_layers} layers")
    sliding = [types[layer] == SLIDING if named else bool(inner.get("use_swa")) for layer in range(num_layers)]
    window = _first("swa_window_size", inner) or own.get("sliding_window")
    if any(sliding) and not isinstance(window, int):
        raise checkpoint.wrong("its config.json does not name the sliding_window of its layers")
    causal = inner.get("causal")
    if causal is None and config.get("sliding_window_non_causal"):
        causal = False
    return tuple(Seen(named and slides if causal is None else bool(causal), window if slides else None) for slides in sliding)
