"""Prompts are to the token what `apply_chat_template` gives for the client's own messages, or they are refused."""

import functools
import json
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cascade.chat.conversation import Conversation
from cascade.chat.template import ChatTemplate, Style
from cascade.engine.tokenizer import Tokenizer, pretrained
from cascade.errors import InvalidRequest
from tests import small
from tests.cases import examples, rare
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


Messages = list[dict[str, Any]]
ASKED: dict[str, Any] = {"role": "user", "content": "Q"}
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f_0", "description": "Zero.", "parameters": PARAMETERS}},
    {"function": {"strict": True, "parameters": PARAMETERS, "name": "f_1"}, "type": "function"},  # in another order
]
KINDS = st.sampled_from(["user", "user", "parts", "system", "developer", "assistant", "thinks", "call", "calls", "named"])


def call(id: str, value: str, name: str = "f_0") -> dict[str, Any]:
    """As OpenAI's client sends it, whose names come after the arguments."""
    return {"id": id, "function": {"arguments": json.dumps({"n": value}), "name": name}, "type": "function"}


def conversation(kinds: list[str]) -> Messages:
    """A conversation in which everything that is said is a word of its own."""
    messages: Messages = []
    for i, kind in enumerate(kinds):
        words, id = f" word{i}x ", f"callid{i:02d}0"
        if kind in ("call", "calls", "named"):
            ids = [id, f"callid{i:02d}1"] if kind == "calls" else [id]
            made = [call(id, f"argument{i}x{place}") for place, id in enumerate(ids)]
            messages.append({"role": "assistant", "content": None, "tool_calls": made})
            name = {"name": "f_0"} if kind == "named" else {}
            messages += [{"tool_call_id": id, "role": "tool", "content": f"word{i}x{id}", **name} for id in ids]
        elif kind == "parts":
            parts = [{"type": "text", "text": f"word{i}x{place} "} for place in range(2)]
            messages.append({"role": "user" if i % 2 else "system", "content": parts})
        elif kind == "thinks":
            messages.append({"role": "assistant", "content": words, "reasoning_content": "hm", "reasoning": "hm"})
        else:
            messages.append({"role": kind, "content": words})
    return messages


def words(messages: Messages) -> list[str]:
    """What must be in a prompt: all but thoughts."""
    contents = [message.get("content") or "" for message in messages]
    texts = [part["text"] for content in contents if isinstance(content, list) for part in content]
    texts += [content for content in contents if isinstance(content, str)]
    calls = [made["function"]["arguments"] for message in messages for made in message.get("tool_calls", ())]
    return [text.strip() for text in texts] + [json.loads(arguments)["n"] for arguments in calls]


def sent(messages: Messages, tools: Any) -> tuple[Messages, Any]:
    """Messages and tools as the assistant has them, once they were checked."""
    body = Conversation.model_validate({"messages": messages} | ({"tools": tools} if tools else {}))
    return [message.given for message in body.messages], [tool.given for tool in body.tools] if body.tools else None


@pytest.mark.parametrize("name", [rare(name) if name.startswith("talker") else name for name in FAMILIES])
def test_prompts_are_the_templates_own(name: str) -> None:
    """Guards prompts whose roles were renamed, calls split or fields added: the model read what no template gives."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    template = ChatTemplate(tokenizer)

    @settings(max_examples=examples(0.4), suppress_health_check=[HealthCheck.too_slow])
    @example(["developer"], False, "ends")  # of which nothing may be left, not even a word of the template's
    @given(st.lists(KINDS, min_size=1, max_size=5), st.booleans(), st.sampled_from(["prompts", "ends", "goes on"]))
    def run(kinds: list[str], shown: bool, ending: str) -> None:
        messages, style = conversation(kinds), Style(prompts=ending == "prompts", goes_on=ending == "goes on")
        given, tools = sent(messages, TOOLS if shown else None)
        try:
            ids = template.encode(given, tools, style)
        except InvalidRequest:
            return
        assert ids == family.prompt(messages, tools, style)
        text = family.prompt(messages, tools, style, tokenize=False)
        assert name == "gpt_oss" or not [word for word in words(messages) if word not in text]
        assert not shown or ("f_0" in text and "f_1" in text)

    run()


SERVED: dict[str, list[str]] = {  # conversations that must not be refused, by the family
    "qwen": ["system user assistant user", "developer user", "user thinks user", "user call user", "user calls", "parts user"],
    "llama": ["developer user assistant user", "user call call user"],
    "mistral": ["system user assistant user", "developer user", "user calls user"],
    "gemma": ["user assistant user"],
    "deepseek": ["system user thinks user", "user calls user"],
    "hermes": ["system user", "user named user"],
    "gpt_oss": ["developer user call user thinks"],
    "vision": ["system parts user assistant"],
    "two by name": ["system developer user thinks"],
    "plain": ["system developer parts user calls thinks"],
    "chatml": ["user system developer thinks"],
    **{f"talker {name}": ["system user calls user"] for name in ("hermes", "mistral", "mistral11", "llama3", "json")},
}


@pytest.mark.parametrize("name", SERVED)
def test_what_a_template_takes_is_served(name: str) -> None:
    """Guards against refusals of conversations that the template writes in full."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    template = ChatTemplate(tokenizer)
    for kinds in SERVED[name]:
        messages = conversation(kinds.split())
        given, tools = sent(messages, TOOLS if template.shows_tools and "call" in kinds else None)
        assert template.encode(given, tools) == family.prompt(messages, tools, Style())


REFUSED: dict[str, tuple[str, str, str]] = {  # family, conversation, words of the sentence
    "a role": ("deaf", "user developer", "leaves out messages.1, whose role is 'system': use another role"),
    "calls": ("chatml", "user call", "leaves out messages.1.tool_calls: say them in words"),
    "two calls": ("llama", "user calls", "does not take these messages: single tool-calls at once!"),
    "no name": ("hermes", "user call", "does not take these messages: a 'name' key is needed"),
    "what Python raises": ("broken", "user", "does not take these messages: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_cannot_carry_is_refused(name: str) -> None:
    """Guards against words, calls and results that a template drops, and its errors, which were failures of the server."""
    family, kinds, sentence = REFUSED[name]
    template = ChatTemplate(FAMILIES[family].tokenizer)
    with pytest.raises(InvalidRequest) as caught:
        template.encode(sent(conversation(kinds.split()), None)[0])
    assert sentence in str(caught.value)


EACH = "{% for name, one in call.function.arguments.items() %}{{ name }}: {{ one }}{% endfor %}"
ITEMS = loop("{{ message.content }}{% for call in message.tool_calls %}" + EACH + "{% endfor %}")
CUT = {"cut": '{"n": "wor', "begun": "{", "a list": "[1]", "half a character": '{"n": "\\ud800"}', "deep": "[" * 5000}


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("name", ["qwen", "deepseek", "mistral", "talker hermes", "items"])
def test_calls_that_were_cut_are_text(name: str, cut: str) -> None:
    """Guards turns that a limit cut within a call: sent back in the next one they were refused, for ever."""
    family = FAMILIES.get(name) or Family(ITEMS)
    template = ChatTemplate(family.tokenizer)
    arguments = CUT[cut]
    made = {"id": "callid000", "type": "function", "function": {"name": "f_0", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "callid000", "content": "no JSON"}
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [made]}, result, ASKED]
    given, tools = sent(messages, TOOLS if template.shows_tools else None)
    text = family.tokenizer.decode(template.encode(given, tools))
    written = arguments if name in ("deepseek", "items") else json.dumps(arguments)[1:-1]
    assert written[:200] in text


def test_tools_that_are_not_shown_are_refused() -> None:
    """Guards /tokenize with tools, which said nothing of them where the template shows none."""
    with pytest.raises(InvalidRequest, match="shows no tools"):
        ChatTemplate(FAMILIES["chatml"].tokenizer).encode([ASKED], TOOLS)


def test_models_without_a_template_hold_no_conversations() -> None:
    """Guards base models: contents were joined, which is a template that nobody chose."""
    template = ChatTemplate(Family(None).tokenizer)
    assert (template.shows_tools, template.thinks, template.written_call, template.variables) == (False, False, "", ())
    assert ChatTemplate(Family("<think></think>").tokenizer).thinks
    with pytest.raises(InvalidRequest, match=r"The model has no chat template: request a completion, or save"):
        template.encode([ASKED])


def test_variables_of_templates_are_for_clients() -> None:
    """Guards `chat_template_kwargs`: honoured if the template reads it, else refused; the library's own are not for clients."""
    family = FAMILIES["qwen"]
    template = ChatTemplate(family.tokenizer)
    for style in (Style({"thinking": False}), Style({"thinking": True})):
        assert template.encode([ASKED], None, style) == family.prompt([ASKED], None, style)
    assert template.encode([ASKED], None, Style({"thinking": False})) != template.encode([ASKED])
    for name in ("thinks", "chat_template", "messages", "tools", "tokenize", "bos_token", "range", "raise_exception"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs has '{name}': of these .* reads thinking"):
            template.encode([ASKED], None, Style({name: "x"}))


def test_reasoning_effort_reaches_templates_that_read_it() -> None:
    """Guards `reasoning_effort`: a variable of such templates, also where the request sets that itself; others ignore it."""
    family = Family(loop("{{ reasoning_effort }}" + TURN))
    wanted = family.prompt([ASKED], None, Style({"reasoning_effort": "high"}))
    for values in ({}, {"reasoning_effort": "high"}):
        body = {"messages": [ASKED], "reasoning_effort": "high", "chat_template_kwargs": values}
        assert ChatTemplate(family.tokenizer).encode([ASKED], style=Conversation.model_validate(body).style) == wanted
    plain = ChatTemplate(FAMILIES["chatml"].tokenizer)
    assert plain.encode([ASKED], style=Style(reasoning_effort="high")) == plain.encode([ASKED])
