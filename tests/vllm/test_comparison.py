"""The page of comparison knows all fields and drafters that the installed vLLM takes."""

import re
from pathlib import Path
from typing import get_args

PAGES = Path(__file__).parents[2] / "docs" / "reference"
KNOWN = set(re.findall(r"`([^`]+)`", (PAGES / "comparison.md").read_text(encoding="utf-8")))


def test_every_field_of_vllms_requests_has_a_row() -> None:
    """Guards newcomers against fields of which the page says nothing."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    for request in (ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest):
        assert request.model_fields.keys() <= KNOWN, request


def test_every_drafter_of_vllms_has_a_row() -> None:
    """Guards newcomers against a `method` of which the page says nothing."""
    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

    assert {*get_args(SpeculativeMethod)} - {*get_args(MTPModelTypes)} | {"mtp"} <= KNOWN
