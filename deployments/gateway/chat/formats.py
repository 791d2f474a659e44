"""How models write calls of tools, and which of these formats a chat template knows."""

import re
import secrets
import string
from dataclasses import dataclass

from deployments.gateway.chat.probes import PROBE_NAME

LETTERS = string.ascii_letters + string.digits
CALL_ID = "[CALL_ID]"  # some models write it and an id between name and arguments


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the models of a family write calls.

    A call is a JSON object with the ``name`` of a function and its arguments as ``key``; where there is a mark ``named``, it
    is a bare name, this mark, and a JSON object of arguments.
    """

    name: str
    begin: str = ""  # before calls; "" where the whole text is calls or none is
    end: str = ""  # after each call
    listed: bool = False  # the calls stand in one JSON list
    again: str = ""  # between two calls that are neither listed nor begun anew
    key: str = "arguments"
    named: str = ""
    id_len: int = 24  # letters and digits of a call's id; some templates want just so many
    id_prefix: str = "call_"

    @property
    def marks(self) -> tuple[str, ...]:
        """Signs that may be special tokens, which decoding leaves out."""
        return (self.begin, self.end, self.named, CALL_ID if self.named else "")

    def new_id(self) -> str:
        """A name for a call, which its result refers to."""
        return self.id_prefix + "".join(secrets.choice(LETTERS) for _ in range(self.id_len))

    def wrote(self, text: str) -> bool:
        """Whether ``text``, the probe's call as a template writes it, is of this format."""
        name, arguments = rf'"name": ?"{PROBE_NAME}"', rf'"{self.key}": ?\{{"a": ?1\}}'
        if self.named:
            between = rf"({re.escape(CALL_ID)}\w+)?"
            return re.search(re.escape(self.begin) + PROBE_NAME + between + re.escape(self.named) + r"\{", text) is not None
        call = rf"\{{\s*({name}, ?{arguments}|{arguments}, ?{name})"
        if self.begin:
            return re.search(re.escape(self.begin) + r"\s*" + (r"\[" if self.listed else "") + call, text) is not None
        return re.match(call, text) is not None


JSON = ToolFormat("json", again=";")
FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),  # NousResearch's Hermes, Qwen 2.5 and 3
        ToolFormat("mistral", "[TOOL_CALLS]", listed=True, id_len=9, id_prefix=""),  # up to the tokenizers of version 7
        ToolFormat("mistral11", "[TOOL_CALLS]", named="[ARGS]", id_len=9, id_prefix=""),  # from 11 on
        ToolFormat("llama3", again=";", key="parameters"),
        JSON,
    )
}
