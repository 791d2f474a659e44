"""A network in one call, where all its layers are: what is the same in all passes of as many tokens is worked out once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cascade.engine.attention import NativePass
from cascade.engine.whole_layer import Angles, Norm, WholeLayer
from cascade.native.attention import ATTENDING, OF_PASS, of_pass, scratch_of
from cascade.native.jit import Step
from cascade.native.layers import Rows, norm_step
from cascade.native.program import Program

KEPT = 32  # tokens of passes whose programs are kept: those of drafts


class WholeNetwork:
    """The forward of a causal language model with ``backbone``, all of whose layers are whole."""

    def __init__(self, backbone: Any, layers: Sequence[WholeLayer], norm: Norm, head: nn.Module) -> None:
        self._backbone = backbone
        self._layers = layers
        self._norm = norm
        self._head = head
        self._room: Room | None = None

    @property
    def ready(self) -> bool:
        """Whether it may go in one call: our own kernel attends, layers are what they were, nobody listens within."""
        if not self._layers[0].native or any(vars(layer.module).get("forward") is not layer for layer in self._layers):
            return False
        modules = (self._backbone, self._backbone.norm, *(layer.module for layer in self._layers))
        return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, planned: NativePass) -> Tensor:
        """Logits ``[kept, vocab_size]`` of the tokens ``ids`` ``[1, tokens]`` at ``keep``."""
        x = self._backbone.embed_tokens(ids)
        angles = self._backbone.rotary_emb(x, position_ids=positions)
        hidden = self._run(x[0], Angles(*(angle[0] for angle in angles)), planned)
        logits: Tensor = self._head(hidden[keep])
        return logits

    def _run(self, x: Tensor, angles: Angles, planned: NativePass) -> Tensor:
        """Normed hidden states ``[tokens, hidden]``, there until the next pass."""
        tokens, room = len(x), self._room
        if room is None or tokens > room.most:
            room = Room(self._layers, self._norm, max(tokens, KEPT), angles)
            self._room = room if tokens <= KEPT else self._room
        return room.run(x, angles, planned)


class Room:
    """Memory for passes of at most ``most`` tokens, and the programs that work in it."""

    def __init__(self, layers: Sequence[WholeLayer], norm: Norm, most: int, like: Angles) -> None:
        self.most = most
        self._layers = layers
        self._norm = norm
        self._x = torch.zeros(most, norm.weight.shape[0])
        self._angles = Angles(*(torch.zeros(most, one.shape[1]) for one in like))
        self._desks = torch.zeros(most * max(sum(layer.parts.widths) for layer in layers))
        self._weights = sum(layer.parts.weights for layer in layers)
        self._programs: dict[tuple[int, int], tuple[Program, Any]] = {}  # by tokens and threads, and what changes in them

    def run(self, x: Tensor, angles: Angles, planned: NativePass) -> Tensor:
        """Normed hidden states ``[tokens, hidden]``, there until the next pass."""
        tokens, threads = len(x), torch.get_num_threads()
        for mine, told in zip((self._x, *self._angles), (x, *angles), strict=True):
            mine[:tokens] = told
        if (tokens, threads) not in self._programs:
            self._programs[tokens, threads] = self._program(tokens, planned)
        program, places = self._programs[tokens, threads]
        given = [(layer.parts.sizes, planned.spans[layer.number], planned.windows[layer.number]) for layer in self._layers]
        scratch = torch.empty(threads * max(scratch_of(spans, sizes) for sizes, spans, _ in given))
        numbers = [of_pass(spans, window, scratch.data_ptr(), sizes) for sizes, spans, window in given]
        program.put(places, [number for number in numbers for _ in range(len(places) // len(numbers))])
        program.run()
        return self._x[:tokens]

    def _program(self, tokens: int, planned: NativePass) -> tuple[Program, Any]:
        x, angles = self._x.data_ptr(), Angles(*(one[:tokens] for one in self._angles))
        steps: list[Step] = []
        for layer in self._layers:
            parts, spans, window = layer.parts, planned.spans[layer.number], planned.windows[layer.number]
            desk = parts.desk(self._desks.data_ptr(), tokens)
            steps += parts.steps(x, x, tokens, desk, list(parts.attention(desk, 0, angles, spans, window)))
        rows = Rows(x, self._x.shape[1])
        steps.append(norm_step(rows, rows, self._x[:tokens].shape, *self._norm))
        program = Program(steps, tokens * self._weights)
        return program, program.places(ATTENDING, OF_PASS)
