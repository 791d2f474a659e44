"""From a conversation to a prompt."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property

from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from deployments.chat.template import Style, Template, Turn

KEPT = ("user", "system", "developer", "tool")  # whose words are never left out; templates drop the assistant's old thoughts
THOUGHTS = ("reasoning_content", "reasoning")  # names that these have, of which templates read one


class ChatTemplate:
    """The tokenizer's own template, if it has one, and how conversations fit into it.

    Base models have none: there the contents follow each other, a blank line in between, without roles, and the model goes on
    behind the last one; calls are JSON.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def own(self) -> Template | None:
        """What the tokenizer brings."""
        backend = self._tokenizer.backend
        return None if backend.chat_template is None else Template(backend)

    @property
    def shows_tools(self) -> bool:
        """Whether the model reads which tools there are."""
        return self.own is not None and self.own.shows_tools

    @property
    def written_call(self) -> str:
        """What stands where the assistant's words would, if it calls a tool; "" if nothing does."""
        return "" if self.own is None else self.own.written_call

    @property
    def thinks(self) -> bool:
        """Whether the assistant may think out loud."""
        return self.own is not None and self.own.thinks

    def encode(self, turns: Sequence[Turn], tools: Sequence[Turn] | None = None, style: Style = Style()) -> list[int]:
        """Token ids of a conversation; raises `InvalidRequest`."""
        known = () if self.own is None else self.own.variables
        strange = next((name for name in style.values if name not in known), None)
        if strange is not None:
            reads = ", ".join(known)[:200] or "none"
            raise InvalidRequest(f"chat_template_kwargs has {strange[:60]!r}: of these the model's chat template reads {reads}")
        if self.own is None:
            return self._tokenizer.encode("\n\n".join(map(_contents, turns)))
        turns = _adapted(self.own, turns)
        text = self.own.write(turns, tools, style)
        lost = self.own.leaves_out(doubted, turns, tools, style) if (doubted := _not_in(text, turns)) else None
        if lost is not None:
            raise InvalidRequest(
                f"The model's chat template leaves out a message of the role {turns[lost]['role']!r} at this place, "
                f"{turns[lost]['content'].strip()[:40]!r}: say it elsewhere, such as in the first message"
            )
        ids: list[int] = self._tokenizer.backend.encode(text, add_special_tokens=False)
        return ids


def _adapted(template: Template, turns: Sequence[Turn]) -> Sequence[Turn]:
    """The turns as the template has a form for them; raises `InvalidRequest` if there is none."""
    roles = {turn["role"] for turn in turns}
    if any("tool_calls" in turn for turn in turns) and not template.writes_calls:
        raise InvalidRequest("messages have tool_calls: the model's chat template does not write them")
    if "tool" in roles and not template.writes_results:
        raise InvalidRequest("messages have the role 'tool': the model's chat template does not write it")
    if "developer" in roles and not template.writes_developers:  # OpenAI's newer name for the same
        turns = [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]
    if any(len(turn.get("tool_calls", ())) > 1 for turn in turns) and not template.writes_several_calls:
        return list(_one_by_one(turns))
    return turns


def _one_by_one(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Each call in a turn of its own, its result behind it."""
    index = 0
    while index < len(turns):
        turn = turns[index]
        index += 1
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            yield turn
            continue
        end = next((at for at in range(index, len(turns)) if turns[at]["role"] != "tool"), len(turns))
        results = turns[index:end]
        ids = [call["id"] for call in calls]
        for place, call in enumerate(calls):
            yield (_without_thoughts(turn) | {"content": ""} if place else turn) | {"tool_calls": [call]}
            yield from (result for result in results if result["tool_call_id"] == call["id"])
        yield from (result for result in results if result["tool_call_id"] not in ids)  # of earlier calls
        index = end


def _without_thoughts(turn: Turn) -> Turn:
    return {key: value for key, value in turn.items() if key not in THOUGHTS}


def _not_in(text: str, turns: Sequence[Turn]) -> list[int]:
    """Turns whose words are not in ``text`` as they are, by index."""
    missing, begin = [], 0
    for index, turn in enumerate(turns):
        said = turn["content"].strip() if turn["role"] in KEPT else ""
        at = text.find(said, begin)
        at = text.find(said) if at < 0 else at  # templates move what the system says
        begin = max(begin, at)
        if at < 0:
            missing.append(index)
    return missing


def _contents(turn: Turn) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    return "\n".join([turn["content"], *calls] if turn["content"] else calls)
