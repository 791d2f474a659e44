"""How vLLM is told to draft: for the offline class and for its server."""

from typing import Any

from benchmarks.peers.contract import NUM_DRAFTED


def configuration(mode: str, tiny: str) -> dict[str, Any] | None:
    """The speculative configuration of a mode; ``None`` is none. ``tiny`` is the folder of the draft model."""
    known: dict[str, dict[str, Any]] = {
        "vllm_ngram": {
            "method": "ngram",
            "num_speculative_tokens": NUM_DRAFTED,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        },
        "vllm_suffix": {"method": "suffix"},
        "vllm_draft": {"method": "draft_model", "model": tiny, "num_speculative_tokens": NUM_DRAFTED},
    }
    return known.get(mode)
