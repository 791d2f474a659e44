"""A network in one call, where all its layers are: what is the same in all passes of as many tokens is worked out once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cascade.engine.attention import NativePass
from cascade.engine.packed_linear import Times
from cascade.engine.whole_layer import Angles, Norm, WholeLayer
from cascade.native.attention import ATTENDING, OF_PASS, of_pass, scratch_of
from cascade.native.jit import Step
from cascade.native.layers import Rows, norm_step
from cascade.native.program import Program

KEPT = 32  # tokens of passes whose programs are kept: those of drafts


class WholeNetwork:
    """The forward of a causal language model with ``backbone``, all of whose layers are whole."""

    def __init__(self, backbone: Any, layers: Sequence[WholeLayer], norm: Norm, head: nn.Module, product: Times) -> None:
        """``product`` is what ``head`` does."""
        self._backbone = backbone
        self._layers = layers
        self._norm = norm
        self._head = head
        self._product = product
        self._turns = Turns(backbone.rotary_emb)
        self._room: Room | None = None

    @property
    def ready(self) -> bool:
        """Whether it may go in one call: our own kernel attends, layers are what they were, nobody listens within."""
        if not self._layers[0].native or any(vars(layer.module).get("forward") is not layer for layer in self._layers):
            return False
        backbone = self._backbone
        modules = (backbone, backbone.embed_tokens, backbone.norm, self._head, *(layer.module for layer in self._layers))
        return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, planned: NativePass) -> Tensor:
        """Logits ``[kept, vocab_size]`` of the tokens ``ids`` ``[1, tokens]`` at ``keep``."""
        hidden = self._of(ids.shape[1]).run(ids[0], positions[0], planned)
        return self._product(hidden.index_select(0, keep))

    def _of(self, tokens: int) -> "Room":
        """One for as many tokens; that of small passes is kept."""
        room = self._room
        if room is None or tokens > room.most:
            room = Room(self._layers, self._norm, self._backbone.embed_tokens.weight, self._turns, max(tokens, KEPT))
            self._room = room if tokens <= KEPT else self._room
        return room


class Turns:
    """Angles of positions. They are kept where they depend on nothing else; others are asked for in every pass."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        kind = getattr(rotary, "rope_type", None)
        self._steady = isinstance(kind, str) and "dynamic" not in kind and kind != "longrope"
        self._kept = self._asked(torch.arange(1))

    @property
    def size(self) -> int:
        """Numbers of a position's cosines, as many as of its sines."""
        return self._kept.cos.shape[1]

    def put(self, positions: Tensor, longest: int, to: Angles) -> None:
        """Of ``positions`` ``[tokens]``, which are below ``longest``, to ``[tokens, size]`` each."""
        if not self._steady:
            for mine, told in zip(to, self._asked(positions), strict=True):
                mine.copy_(told)
            return
        if longest > len(self._kept.cos):
            self._kept = self._asked(torch.arange(2 * longest))
        for mine, known in zip(to, self._kept, strict=True):
            torch.index_select(known, 0, positions, out=mine)

    def _asked(self, positions: Tensor) -> Angles:
        return Angles(*(angle[0] for angle in self._rotary(torch.empty(0, dtype=torch.float32), position_ids=positions[None])))


class Room:
    """Memory for passes of at most ``most`` tokens, and the programs that work in it."""

    def __init__(self, layers: Sequence[WholeLayer], norm: Norm, embedding: Tensor, turns: Turns, most: int) -> None:
        self.most = most
        self._layers = layers
        self._norm = norm
        self._embedding = embedding
        self._turns = turns
        self._x = torch.zeros(most, norm.weight.shape[0])
        self._angles = Angles(torch.zeros(most, turns.size), torch.zeros(most, turns.size))
        self._desks = torch.zeros(most * max(sum(layer.parts.widths) for layer in layers))
        self._weights = sum(layer.parts.weights for layer in layers)
        self._programs: dict[tuple[int, int], tuple[Program, Any]] = {}  # by tokens and threads, and what changes in them

    def run(self, ids: Tensor, positions: Tensor, planned: NativePass) -> Tensor:
        """Normed hidden states ``[tokens, hidden]`` of ``[tokens]``, there until the next pass."""
        tokens, threads = len(ids), torch.get_num_threads()
        spans = [planned.spans[layer.number] for layer in self._layers]
        x, angles = self._x[:tokens], Angles(*(one[:tokens] for one in self._angles))
        x.copy_(self._embedding.index_select(0, ids))
        self._turns.put(positions, spans[0].longest, angles)
        if (tokens, threads) not in self._programs:
            self._programs[tokens, threads] = self._program(tokens, planned)
        program, places = self._programs[tokens, threads]
        size = max(scratch_of(spans[0], layer.parts.sizes) for layer in self._layers)
        scratch = torch.empty(threads * size)
        numbers = [
            of_pass(one, planned.windows[layer.number], scratch.data_ptr(), size)
            for layer, one in zip(self._layers, spans, strict=True)
        ]
        program.put(places, np.repeat(np.array(numbers), len(places) // len(numbers), axis=0))
        program.run()
        return x

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
