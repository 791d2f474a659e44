"""Chat templates in the manner of families, each with what it does to conversations, and what a direct call gives for them."""

import functools
import json
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from cascade.chat.template import Style
from cascade.engine.tokenizer import Tokenizer, pretrained
from tests import small
from tests.talkers import CALLS, template

TURN = "<{{ message.role }}>{{ message.content }}<end>"
JSON_CALL = '<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>'
BEGIN = (
    "{% if add_generation_prompt %}<assistant>"
    "{% if thinking is defined and not thinking %}<think></think>{% endif %}{% endif %}"
)
SHOWN = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"


def loop(body: str, *, before: str = SHOWN) -> str:
    return before + "{% for message in messages %}" + body + "{% endfor %}" + BEGIN


QWEN = (  # passes over roles that it does not know, writes thoughts after the last question only, groups results
    "{% if message.role in ('user', 'system') %}" + TURN + "{% elif message.role == 'assistant' %}<assistant>"
    "{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls %}" + JSON_CALL + "{% endfor %}<end>"
    "{% elif message.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<user>{% endif %}"
    "<result>{{ message.content }}</result>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<end>{% endif %}{% endif %}"
)
LLAMA = (  # one call at a time, without the words beside it; results as JSON
    "{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}"
    "{{ raise_exception('single tool-calls at once!') }}{% endif %}"
    '{% set call = message.tool_calls[0].function %}<assistant>{"name": "{{ call.name }}", "parameters": '
    "{{ call.arguments | tojson }}}<end>{% elif message.role == 'tool' %}"
    "<ipython>{{ {'output': message.content} | tojson }}<end>"
    "{% else %}<{{ message.role }}>{{ message.content | trim }}<end>{% endif %}"
)
MISTRAL = (  # functions as they came, ids of calls, only known roles
    "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% elif message.role == 'system' and loop.first %}"
    "[SYSTEM]{{ message.content }}[/SYSTEM]{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    '{{ call.function | tojson }}, "id": "{{ call.id }}"}{% endfor %}]{% elif message.role == \'assistant\' %}'
    "{{ message.content }}{% elif message.role == 'tool' %}[RESULT]{{ message.tool_call_id }}: {{ message.content }}"
    "{% else %}{{ raise_exception('Only user, system, assistant and tool roles are supported!') }}{% endif %}"
)
GEMMA = (  # no system role, turns that alternate, contents as text or parts
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ message.role }}>{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}{{ part.text | trim }}{% endfor %}{% endif %}<end>"
)
DEEPSEEK = (  # arguments as text, thoughts in contents cut off
    "{% if message.role == 'assistant' %}<assistant>{% for call in message.tool_calls %}"
    "{{ '<call>' + call.function.name + '<sep>' + call.function.arguments + '</call>' }}{% endfor %}"
    "{{ message.content.split('</think>') | last if message.content else '' }}<end>{% else %}" + TURN + "{% endif %}"
)
HERMES = (  # wants the names of functions with results
    "{% if message.role == 'tool' %}{% if message.name is not defined %}"
    "{{ raise_exception(\"a 'name' key is needed\") }}{% endif %}"
    "<tool>{{ message.name }}: {{ message.content }}<end>{% elif message.tool_calls %}{% for call in message.tool_calls %}"
    + JSON_CALL
    + "{% endfor %}{% else %}"
    + TURN
    + "{% endif %}"
)
GPT_OSS = (  # the first call alone, and a system turn at the begin alone
    "{% if message.role in ('system', 'developer') %}{% if loop.first %}" + TURN + "{% endif %}{% elif message.tool_calls %}"
    "{% set call = message.tool_calls[0] %}<assistant>{{ message.thinking }}" + JSON_CALL + "{% else %}" + TURN + "{% endif %}"
)
VISION = (  # contents as parts alone: letters of a text are no parts
    "<{{ message.role }}>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<end>"
)


published = functools.cache(pretrained)  # conversations by the hundred are put to each


@dataclass(frozen=True)
class Family:
    """A template, and in which form it takes what OpenAI says in another way."""

    template: Any  # text, or texts by name
    objects: bool = True  # arguments of calls are objects, not JSON in a text
    parts: bool = False  # contents are lists of parts
    developers: bool = True  # their role is written

    @property
    def tokenizer(self) -> Tokenizer:
        return replace(Tokenizer.from_pretrained(small.paths()[-1]), chat_template=self.template)

    def prompt(self, messages: Any, tools: Any, style: Style, *, tokenize: bool = True, source: str = "") -> Any:
        """What Transformers' `apply_chat_template` gives for a client's messages; raises whatever the template does."""
        tokenizer = published(source or small.paths()[-1])
        tokenizer.chat_template = self.template
        return tokenizer.apply_chat_template(
            [self._plain(message, bool(tools)) for message in deepcopy(messages)],
            tools=tools,
            tokenize=tokenize,
            return_dict=False,
            add_generation_prompt=style.prompts,
            continue_final_message=style.goes_on,
            **style.values,
        )

    def _plain(self, message: dict[str, Any], tools: bool) -> dict[str, Any]:
        if message["role"] == "developer" and not (self.developers and not (tools and isinstance(self.template, dict))):
            message["role"] = "system"
        for call in (message.get("tool_calls") or ()) if self.objects else ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        content = message.get("content")
        if isinstance(content, list) and not self.parts:
            message["content"] = "".join(part["text"] for part in content)
        elif content and isinstance(content, str) and self.parts:
            message["content"] = [{"type": "text", "text": content}]
        return message


FAMILIES = {
    "plain": Family((small.PACKED / "tokenizer" / "chat_template.jinja").read_text()),
    "chatml": Family(loop(TURN, before="")),
    "qwen": Family(loop(QWEN), developers=False),
    "llama": Family(loop(LLAMA)),
    "mistral": Family(loop(MISTRAL), developers=False),
    "gemma": Family(loop(GEMMA, before=""), developers=False),
    "deepseek": Family(loop(DEEPSEEK, before=""), objects=False),
    "hermes": Family(loop(HERMES)),
    "gpt_oss": Family(loop(GPT_OSS)),
    "vision": Family(loop(VISION, before=""), parts=True),
    "two by name": Family({"default": loop(TURN, before=""), "tool_use": loop(QWEN)}),
    "deaf": Family(loop("{% if message.role == 'user' %}" + TURN + "{% endif %}"), developers=False),
    "broken": Family("{{ tools | length }}" + loop(TURN)),
    **{f"talker {name}": Family(template(name)) for name in CALLS},
}
