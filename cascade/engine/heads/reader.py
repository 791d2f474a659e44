"""A head beside a model: it reads the hidden states that a pass computes, and guesses after the texts of the pass.

What a head keeps are two further layers of the sessions' stores, behind the model's: its own keys and values, and a layer that
nobody attends to, with the states that it reads. So rollback, prefix reuse, forks, joins and freeing need no code of their own.
The entries are exact but for one: where a row begins at the first position of a fork, the entry before it was made with the
next token of the base's text. The head guesses a little worse then.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.cpu.attention import Kind
from cascade.cpu.cache import BlockedFork
from cascade.draft import Draft
from cascade.engine.heads.eagle import Eagle
from cascade.engine.network.attention import Span
from cascade.engine.network.contiguous import Fork
from cascade.engine.network.survey import Survey
from cascade.engine.sampling.own_tokens import own_tokens_and_next, runner_ups
from cascade.engine.sampling.processors import shape_next
from cascade.engine.sampling.state import SequenceState
from cascade.errors import ModelError
from cascade.params import SamplingParams
from cascade.scorer import MAX_FORKED, UNREAD, Row, Scored, gap_byte

OFFERED = 1.0  # nats: the runner-up of a first guess is offered as a branch if its gap is smaller


class Text(NamedTuple):
    """The end of a session's text after a pass; its store holds what the head keeps of all tokens but the last."""

    store: Any
    start: int  # position of tokens[0], the first that the pass read
    tokens: Sequence[int]
    guesses: int  # wanted after it
    params: SamplingParams
    state: SequenceState | None = None  # what its own tokens depend on besides logits, if they do
    num_new: int = 0  # last tokens that `state` does not hold yet

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def shaped(self) -> bool:
        """Whether its own tokens depend on the tokens before them, guesses included."""
        return self.state is not None and self.state.alters


class Guesses:
    """The guesses after several texts, made step by step for all of them together.

    The host waits for a step only where own tokens of a text depend on the guesses before them.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts = texts
        self._steps: list[tuple[list[int], Tensor]] = []  # indices of texts, and what `own_tokens_and_next` chose for them

    @property
    def step(self) -> int:
        """Steps made so far."""
        return len(self._steps)

    def choose(self, active: Sequence[int], logits: Tensor) -> Tensor:
        """The next guess ``[n]`` after each text whose index is in ``active``, from ``logits`` ``[n, vocab_size]``."""
        texts = [self.texts[index] for index in active]
        if any(text.shaped for text in texts):
            parts = logits.split(1)
            logits = torch.cat([self._shape(index, part) for index, part in zip(active, parts, strict=True)])
        chosen = own_tokens_and_next(logits, [(text.params, text.end + self.step, 1) for text in texts], 1)
        self._steps.append((list(active), chosen))
        return chosen[0]

    def _shape(self, index: int, logits: Tensor) -> Tensor:
        text = self.texts[index]
        if text.state is None or not text.shaped:
            return logits.float()
        before = [int(chosen[0, active.index(index)]) for active, chosen in self._steps]
        new = text.tokens[len(text.tokens) - text.num_new :]
        return shape_next(logits, text.params, text.state, text.end - text.num_new, [*new, *before])

    def drafts(self) -> list[Draft]:
        """The draft after each text: its guesses as a line, and the runner-up of the first as a branch where it is close."""
        lines: list[list[tuple[int, int]]] = [[] for _ in self.texts]  # tokens and confidences
        branches: list[list[tuple[int, int]]] = [[] for _ in self.texts]
        for active, chosen in self._steps:
            rows = chosen.tolist()
            for index, token, others in zip(active, rows[0], runner_ups(rows, 1), strict=True):
                if not lines[index]:
                    branches[index] = [(other.token, gap_byte(other.gap)) for other in others if other.gap < OFFERED]
                lines[index].append((token, gap_byte(others[0].gap if others else math.inf)))
        return [_draft(line, branch) for line, branch in zip(lines, branches, strict=True)]


def _draft(line: list[tuple[int, int]], branch: list[tuple[int, int]]) -> Draft:
    nodes = [*line, *branch]
    parents = (*range(-1, len(line) - 1), *[-1] * len(branch))
    return Draft(tuple(token for token, _ in nodes), bytes(len(nodes)), bytes(gap for _, gap in nodes), parents)


class Reader:
    """Serves ``head`` beside ``network``; raises `ModelError` if the layers of the network are not found."""

    def __init__(self, head: Eagle, network: PreTrainedModel) -> None:
        self.head = head
        self._network = network
        self._hidden: dict[int, Tensor] = {}  # of the last pass, `[n, hidden_size]`
        self._dtype = network.dtype  # of the states
        # as a part of the model
        self._layer = 0  # number of the head's layer, behind the model's
        self._states_layer = 1  # number of the layer that holds the states
        self._attention: Any = None  # that of the model
        self._windows: dict[int, int | None] = {}  # of all layers
        for layer in sorted(set(head.reads)):
            self._hook(layer)

    def _hook(self, layer: int) -> None:
        """Note a hidden state in each pass: the input of a layer, or after the last one the output of all layers."""
        owner, layers = decoder(self._network)

        def note_given(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._hidden[layer] = (given[0] if given else named["hidden_states"])[0]

        def note_returned(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            self._hidden[layer] = out[0][0]

        if layer == len(layers):
            owner.register_forward_hook(note_returned)
        else:
            layers[layer].register_forward_pre_hook(note_given, with_kwargs=True)

    def renew(self, head: Eagle) -> None:
        """Use ``head`` from the next pass on; raises `ModelError` if it has other shapes, states or tokens."""
        shapes, others = ({name: part.shape for name, part in one.state_dict().items()} for one in (head, self.head))
        if shapes != others or head.known != self.head.known or head.reads != self.head.reads:
            raise ModelError(
                "the head has another shape, reads other states or knows other tokens than the one that it replaces"
            )
        self.head = head

    def add_layers(self, found: Survey) -> None:
        """Add the head's layers to those that were found of the model."""
        config = self.head.config
        self._layer = 1 + max(found.windows)
        self._states_layer = self._layer + 1
        found.windows[self._layer] = None
        found.heads[self._layer] = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim)
        found.kept[self._states_layer] = config.hidden_size

    def attach(self, attention: Any, windows: dict[int, int | None]) -> None:
        """Use the attention that the model uses, and the windows of all layers."""
        self._attention, self._windows = attention, windows

    # what a pass computes

    def record(self, hidden: Mapping[int, Tensor]) -> None:
        """Take the hidden states of the last pass, ``[n, hidden_size]`` each, where no module of the network ran."""
        self._hidden.update(hidden)

    def finish_pass(self, spans: Sequence[Span]) -> None:
        """Keep the states that the head reads of a pass, for each of its ``spans``; nothing if there are none."""
        hidden = [self._hidden[layer] for layer in self.head.reads] if spans else []
        self._hidden.clear()
        if not spans:
            return
        states = self.head.state(hidden)
        self._dtype = states.dtype  # a store may hold them in another one
        for span in spans:
            span.cache.put(self._states_layer, span.start, states[span.begin : span.end])

    def states(self, spans: Sequence[Span]) -> Tensor:
        """What was kept of these positions, one after another, ``[n, hidden_size]``."""
        kept = [span.cache.get(self._states_layer, span.positions.start, span.positions.stop) for span in spans]
        return torch.cat(kept).to(self._dtype)

    # guesses

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], scored: Sequence[Scored]) -> list[Scored]:
        """Let the head read the rows of a pass and their own tokens, and guess after those rows that ask for it."""
        texts = {index: text for index, row in enumerate(rows) if (text := self._text(row, scored[index])) is not None}
        drafts = dict(zip(texts, self._drafts([*texts.values()]), strict=True))
        return [replace(result, draft=drafts[index]) if drafts.get(index) else result for index, result in enumerate(scored)]

    def _text(self, row: Row, scored: Scored) -> Text | None:
        """The end of a row's text after the pass; None if the head does not read it: a fork without its whole row accepted."""
        if row.guesses == UNREAD:
            return None
        new = row.draft.walk(scored.own)[0] if row.num_own == 1 and scored.own else []
        wanted = min(row.guesses, MAX_FORKED) if new else 0
        text = Text(row.cache, row.start, [*row.tokens, *new], wanted, row.params, row.state, len(new))
        if not isinstance(row.cache, Fork | BlockedFork):
            return text
        return text._replace(guesses=0) if new and text.end == row.start + len(row.input_ids) + 1 else None

    def _drafts(self, texts: Sequence[Text]) -> list[Draft]:
        """Guesses after each text, as many as are wanted."""
        last, guesses = self._read(texts), Guesses(texts)
        active = [index for index in last if texts[index].guesses]
        if active:
            with ExitStack() as forks:
                stores = {index: _store_for_guesses(texts[index], forks) for index in active}
                self._guess(guesses, stores, torch.stack([last[index] for index in active]))
        return guesses.drafts()

    def _read(self, texts: Sequence[Text]) -> dict[int, Tensor]:
        """Go on with what a pass has read: the head's output at the last token of each text that grew, by its index."""
        spans: list[Span] = []
        tokens: list[int] = []
        ends: dict[int, int] = {}
        for index, text in enumerate(texts):
            first = max(text.store.position, text.start - 1)  # whose next token is known only now; what is before is its base's
            new = list(text.tokens[first + 1 - text.start :])
            if new:
                spans.append(Span(text.store, len(tokens), len(tokens) + len(new), first))
                tokens += new
                ends[index] = len(tokens) - 1
        if not tokens:
            return {}
        ids = torch.tensor(tokens).to(self._network.device, non_blocking=True)
        out = self._forward(ids, self.states(spans), spans)
        return {index: out[end] for index, end in ends.items()}

    def _guess(self, guesses: Guesses, stores: Mapping[int, Any], out: Tensor) -> None:
        """Guess after each text, by its index, and after its guesses; ``out`` is the head's output at the ends of texts."""
        active, texts = list(stores), guesses.texts
        while True:
            chosen = guesses.choose(active, self.head.all_logits(out))
            kept = [row for row, index in enumerate(active) if texts[index].guesses > guesses.step]
            if not kept:
                return
            active = [active[row] for row in kept]
            ends = [texts[index].end - 2 + guesses.step for index in active]
            spans = [Span(stores[index], row, row + 1, ends[row]) for row, index in enumerate(active)]
            out = self._forward(chosen[kept], self.head.next_state(out[kept]), spans)

    def _forward(self, tokens: Tensor, states: Tensor, spans: Sequence[Span]) -> Tensor:
        """The head's output ``[n, hidden_size]`` at the positions of ``spans``, where its keys and values are stored."""
        positions = torch.tensor([position for span in spans for position in span.positions])
        planned = self._attention.plan(spans, self._windows)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = planned.attend(self._layer, query, key, value, Kind(query.shape[3] ** -0.5))
            return out

        return self.head(tokens, states, positions.to(tokens.device, non_blocking=True)[None], attend)


def _store_for_guesses(text: Text, forks: ExitStack) -> Any:
    """Where keys and values of the guesses after a text are written, but for the last guess, which is not read.

    The session's own store if it has memory after the text, or else a fork, which ``forks`` will free.
    """
    begin = text.end - 1
    if begin + text.guesses - 1 <= max(begin, text.store.capacity):
        return text.store
    fork = text.store.fork(begin)
    forks.callback(fork.free)
    return fork


def decoder(network: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that applies the layers of a model, and these in their order; raises `ModelError` if they are not found."""
    number = network.config.get_text_config().num_hidden_layers
    for owner in network.base_model.modules() if network.base_model is not network else ():
        for layers in owner.children():
            if isinstance(layers, nn.ModuleList) and len(layers) == number:
                return owner, layers
    raise ModelError(f"the layers of {type(network).__name__} are not found")
