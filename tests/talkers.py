"""Tokenizers that know conversations and tools, a model that says what it was told, and servers of both."""

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken

from cascade.chat.template import CLOSE, OPEN
from cascade.engine.tokenizer import pretrained
from cascade.simulation.toy_tier import fold
from tests import small
from tests.in_process import House, house, serving
from tests.tier.test_tier import CountingModel
from tests.toys import Numbers

# as the families write them; `{tools}` and `{call}` and `{result}` are theirs
CHAT = (
    "{{%- if tools %}}<|system|>{tools}{{% endif %}}"
    "{{%- for message in messages %}}<|{{{{ message.role }}}}|>"
    "{{%- if message.tool_calls is defined %}}{{{{ message.content }}}}{call}"
    "{{%- elif message.role == 'tool' %}}{result}"
    "{{%- else %}}{{{{ message.content }}}}{{% endif %}}<|end|>"
    "{{%- endfor %}}"
    "{{%- if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
TOOLS = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
RESULT = "{{ message.tool_call_id }}: {{ message.content }}"
CALL = '{{"name": "{{{{ call.function.name }}}}", "{key}": {{{{ call.function.arguments | tojson }}}}}}'
ARGUMENTS, PARAMETERS = CALL.format(key="arguments"), CALL.format(key="parameters")
EACH = "{% for call in message.tool_calls %}"
CALLS = {
    "hermes": EACH + "\n<tool_call>\n" + ARGUMENTS + "\n</tool_call>{% endfor %}",
    "mistral": "[TOOL_CALLS] [" + EACH + ARGUMENTS + "{{ ', ' if not loop.last }}{% endfor %}]",
    "mistral11": EACH + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}",
    "llama3": EACH + PARAMETERS + "{% endfor %}",
    "json": EACH + ARGUMENTS + "{{ '; ' if not loop.last }}{% endfor %}",
    "strange": EACH + "<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>{% endfor %}",
}
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")


def template(format: str | None) -> str:
    """A chat template that writes calls so; without a format it knows no tools at all."""
    if format is None:
        return CHAT.format(tools="", call="", result="").replace("{%- if tools %}<|system|>{% endif %}", "")
    return CHAT.format(tools=TOOLS, call=CALLS[format], result=RESULT)


def folder() -> Path:
    """A new one, for as long as this process lives."""
    path = tempfile.mkdtemp(prefix="cascade-talker-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def talker(format: str | None, *, marks: bool = True) -> str:
    """Save a tokenizer whose template writes calls in this format; its marks are tokens as in the families, or spelled."""
    backend = pretrained(small.config().tiers[-1].model_loading_config.source)
    backend.add_tokens([AddedToken(role, special=True, normalized=False) for role in ROLES], special_tokens=True)
    if marks:
        backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
        special = [AddedToken(mark, special=True, normalized=False) for mark in ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")]
        backend.add_tokens(special, special_tokens=True)
    backend.chat_template = template(format)
    backend.eos_token = "<|end|>"
    backend.save_pretrained(path := folder())
    return str(path)


class Parrot(CountingModel):
    """Says what the last user said, word for word; drafters err at the share of places that they do not agree on."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options, order=1 << 20)
        self.user = self.end = self.assistant = self.bracket = 0

    def logits(self, context: tuple[int, ...]) -> Numbers:
        logits = np.zeros(self.vocab_size)
        logits[self.end], logits[self.bracket] = 20.0, 10.0  # where it may not say what it wants to
        if self.assistant not in context:  # no conversation
            return logits
        begin, turn = _last(context, self.user), _last(context, self.assistant)
        written = context[begin + 1 :]
        spoken = written[: written.index(self.end)] if self.end in written else ()
        place = len(context) - turn - 1
        right = spoken[place] if place < len(spoken) else self.end
        lot = fold(context[-8:], self.seed ^ hash(self.agreement)) / 2**64
        logits[right if lot < self.agreement else right ^ 1] = 40.0
        return logits


# as Qwen3's and DeepSeek's: old thoughts are written, a variable opens or closes those of the new turn
BEGINS = "{% if thinking is defined %}<think>\n{% if not thinking %}</think>\n{% endif %}{% endif %}"
WROTE = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"


@functools.cache
def thinker(tags: Literal["token", "special"]) -> str:
    """The same, of a model that thinks out loud, between tags that are tokens or special tokens."""
    backend = pretrained(talker("hermes"))
    added = [AddedToken(tag, special=tags == "special", normalized=False) for tag in (OPEN, CLOSE)]
    backend.add_tokens(added, special_tokens=tags == "special")
    backend.chat_template = backend.chat_template.replace("<|assistant|>", "<|assistant|>" + BEGINS).replace(
        "<|{{ message.role }}|>", "<|{{ message.role }}|>" + WROTE
    )
    backend.save_pretrained(path := folder())
    return str(path)


def conversing(tags: Literal["token", "special"] = "token", **options: Any) -> Any:
    """A fixture: for all tests of a file a house of parrots that know conversations, tools and thoughts."""
    return serving(make=lambda **given: parrots(thinker(tags), **given), **{"pass_s": 0.001, **options})


def talking(format: str, *, marks: bool = True, **options: Any) -> AbstractContextManager[House]:
    """A house of parrots that know conversations and tools; ``options`` are those of `in_process.house`."""
    return parrots(talker(format, marks=marks), **options)


@contextlib.contextmanager
def parrots(source: str, **options: Any) -> Iterator[House]:
    """A house of parrots with the tokenizer of a `talker` or a `thinker`."""
    backend = pretrained(source)

    def parrot(**options: float) -> Parrot:
        model = Parrot(**options)
        model.user, model.assistant, model.end = (backend.convert_tokens_to_ids(ROLES[i]) for i in (1, 2, 4))
        model.bracket = backend.convert_tokens_to_ids("]")
        return model

    with house(model=parrot, full={"model_loading_config": {"model_source": source}}, **options) as built:
        yield built
        built.settle()


def _last(context: tuple[int, ...], token: int) -> int:
    return len(context) - 1 - context[::-1].index(token)
