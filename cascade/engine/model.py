"""One batched pass: rows of any sessions from any positions, packed into one input of a network."""

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from cascade.cpu.cache import Packed
from cascade.engine import devices, draft_vocab
from cascade.engine.checkpoint import Network, load, network_of
from cascade.engine.gguf import converted
from cascade.engine.model_config import context_len
from cascade.engine.network.llama import Llama
from cascade.engine.network.published import Published, probe_texts
from cascade.engine.sampling.own_tokens import Report, prepare, scored
from cascade.engine.sampling.state import report
from cascade.engine.threads import Pace, Threads, limited
from cascade.engine.trees import run_trees
from cascade.engine.weights import HEAD, check_replaces, shape_of, unread
from cascade.errors import ModelError
from cascade.params import SamplingParams
from cascade.scorer import Row, Runs, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

SCORED = 16  # own tokens of a pass that is timed, at most
RENEWAL_SHARE = 0.2  # share of a core for loading new weights while passes run


class Model(Runs):
    """A causal language model that scores packed rows; see `cascade.scorer.Scorer`."""

    healthy = True  # passes run in this process, so there is nothing else to check

    def __init__(
        self,
        network: "Network | PreTrainedModel",
        *,
        cache_tokens: int | None = None,
        gpu_memory_utilization: float = devices.UTILIZATION,
        num_threads: int | None = None,
    ) -> None:
        """Take over a loaded network; raises `ModelError` if it cannot run packed passes.

        ``cache_tokens`` is the number of positions of keys and values, by default as many as the device has room for, see
        `cascade.engine.devices.cache_tokens`. Passes on a CPU take ``num_threads``, by default chosen by timing, see
        `cascade.engine.threads`.
        """
        self.network: Network = network if isinstance(network, Llama | Published) else network_of(network)
        self.device, self.dtype = self.network.device, self.network.dtype
        self.vocab_size = self.network.vocab_size  # rows of the output embedding, padding included
        self._busy = threading.Lock()  # several tiers may share a model, and its passes share memory
        self.same_bits = self._probe() and self.network.same_bits  # whether logits seem to have the same bits in every pass
        prepare(self.device, self.dtype, self.vocab_size)
        self.cache_tokens = cache_tokens or devices.cache_tokens(self.device, self.bytes_per_token, gpu_memory_utilization)
        if num_threads is not None or self.device.type != "cpu":
            self.threads = Threads(num_threads or torch.get_num_threads())
        else:
            self.threads = Threads.find(self._try, torch.get_num_threads())

    @classmethod
    def from_pretrained(
        cls, source: str, *, cache_tokens: int | None = None, num_threads: int | None = None, **loading: Any
    ) -> Self:
        """Load from a path or the hub, by default to the GPU if there is one; ``loading`` are options of `load`."""
        return cls(load(source, **loading), cache_tokens=cache_tokens, num_threads=num_threads)

    def cut(self, layers: Sequence[int]) -> Self:
        """A model of ``layers`` of this one, on the same weights; raises `ModelError` if some do not exist.

        It has memory for as many positions as this one. Both may run at the same time.
        """
        other = copy.copy(self)
        other.network = self.network.cut(layers)
        other._busy = threading.Lock()
        other._probe()
        return other

    @property
    def context_len(self) -> int:
        """Positions for which the model was made, and up to which logits do not depend on the length of the text."""
        return context_len(self.network.config)

    @property
    def summary(self) -> str:
        place = devices.processor() if self.device.type == "cpu" else str(self.device)
        bits = "have the same bits in every pass" if self.same_bits else "may differ in their last bits from pass to pass"
        threads = f"; threads of a pass: {self.threads}" if self.device.type == "cpu" else ""
        return f"{str(self.dtype).removeprefix('torch.')} on {place}; logits {bits}{threads}"

    @property
    def num_parameters(self) -> int:
        return self.network.num_parameters

    @property
    def weights_read(self) -> tuple[int, int, int]:
        """Number of layers; mean weights of a layer that a pass reads; weights of the output embedding."""
        return self.network.weights_read

    def close(self) -> None:
        """Does nothing, since nothing runs outside this process."""

    # passes

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""
        return self.network.new_cache()

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        """See `cascade.scorer.Scorer`. The work happens in `collect`, in the calling thread, without the GIL."""
        return rows

    def collect(self, launched: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`; one host read, and two more for each row with logprobs."""
        rows = launched
        trees = any(row.draft.parents for row in rows)
        with self._busy, limited(self.threads.count(sum(len(row.input_ids) for row in rows))):
            return run_trees(rows, self._score, shares_pass=True) if trees else self._score(rows)

    @torch.inference_mode()
    def _score(self, rows: Sequence[Row], on_scored: Report = report) -> list[Scored]:
        """Own tokens of rows whose drafts are lines; ``on_scored`` is called like `report`."""
        return scored(self.logits(rows), rows, on_scored)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits ``[sum of num_scored, vocab_size]`` of the rows' last positions."""
        return self.network.logits(Packed.of(rows))

    def _try(self, num_tokens: int) -> None:
        tokens = [place % self.vocab_size for place in range(min(num_tokens, self.context_len - 1))]
        cache = self.new_cache()
        self._score([Row(cache, 0, tokens, min(len(tokens), SCORED), SamplingParams(temperature=0, seed=0))])
        cache.free()

    def _probe(self) -> bool:
        """Whether the last token of a text gets the same bits alone and beside another text. Also sets `bytes_per_token`.

        Raises `ModelError` if the logits are not finite.
        """
        texts, params = probe_texts(self.vocab_size), SamplingParams()
        caches, n = [self.new_cache() for _ in texts], len(texts[0]) - 1
        together = self.logits([Row(cache, 0, text, len(text), params) for cache, text in zip(caches, texts, strict=True)])
        alone = self.logits([Row(caches[0], n, texts[0][n:], 1, params)])
        if not together.isfinite().all():
            raise ModelError(f"A {self.network.config.model_type} model cannot be served: its logits are not finite numbers")
        self.bytes_per_token = int(caches[0].nbytes // max(1, caches[0].capacity))  # bytes of keys and values
        for cache in caches:
            cache.free()
        return torch.equal(together[n], alone[0])

    # new weights

    def renew(self, source: str) -> None:
        """Use the weights of ``source`` from the next pass on.

        Only for draft tiers, whose texts may change. Keys and values of the old weights stay, so drafts after such texts are a
        little worse. Passes continue meanwhile: loading takes a small share of one core. Raises `ModelError` if shapes differ;
        then nothing has changed.
        """
        folder, here = converted(source), self.network
        draft_vocab.check_same(folder, here.draft_ids)
        with limited(1), unread(folder) as weights:
            shapes = {name: shape_of(part) for name, part in weights.items()}
            check_replaces(source, here.shapes, shapes, {HEAD} if here.config.tie_word_embeddings else ())
            network = here.renewed(weights, Pace(RENEWAL_SHARE).rest)
            with self._busy:
                self.network = network
