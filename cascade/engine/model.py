"""One batched pass: rows of any sessions from any positions, packed into one input of a network, ours or Transformers'."""

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from cascade.engine import devices
from cascade.engine.draft_vocab import DraftHead, draft_ids
from cascade.engine.gguf import converted
from cascade.engine.loading import load
from cascade.engine.model_config import context_len, unlike_attention
from cascade.engine.network.attention import ATTENTION, Native, register
from cascade.engine.network.contiguous import Attention, Contiguous
from cascade.engine.network.cut import copied, cut, stack
from cascade.engine.network.llama import Llama, is_written_out
from cascade.engine.network.plain import Plain, kind_of
from cascade.engine.network.products import keeps_bits, multiply_row_by_row
from cascade.engine.network.survey import Survey, agree, probe_texts
from cascade.engine.sampling.own_tokens import prepare
from cascade.engine.sampling.processors import report
from cascade.engine.scoring import Packed, Report, scored
from cascade.engine.threads import Pace, Threads, limited
from cascade.engine.trees import run_trees
from cascade.engine.weights import check_replaces, shape_of, unread
from cascade.errors import ModelError, reason
from cascade.params import SamplingParams
from cascade.scorer import Row, Runs, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

    Network: TypeAlias = Plain | PreTrainedModel

SCORED = 16  # own tokens of a timed pass, at most
RENEWAL_SHARE = 0.2  # the share of a core that new weights take while passes run


class Model(Runs):
    """A causal language model that scores packed rows; see `cascade.scorer.Scorer`."""

    healthy = True  # its passes run in this process, which ends with them

    def __init__(
        self,
        network: "Network",
        *,
        cache_tokens: int | None = None,
        gpu_memory_utilization: float = devices.UTILIZATION,
        attention: Attention | None = None,
        num_threads: int | None = None,
        owned: bool = False,
    ) -> None:
        """Take over a loaded network; raises `ModelError` if it cannot run packed passes.

        There is memory for ``cache_tokens`` positions of keys and values; by default for as many as the device has room for,
        see `cascade.engine.devices.cache_tokens`. ``attention`` is the device's by default; models do not share one. Passes on
        a CPU take ``num_threads``; by default as many of PyTorch's as they are worth, see `cascade.engine.threads`. A
        network that is ``owned``, which nothing else uses, loses the weights that are held in another order.
        """
        self._network: Any = network.eval()
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        devices.add_exactly(self.device)
        self.vocab_size = 0  # rows of the output embedding, padding included
        self.bytes_per_token = 0
        self._seen = Survey()  # what its layers are
        self._busy = threading.Lock()  # tiers may share a model, and its passes share memory
        self._llama: Llama | None = None  # runs passes in place of the network
        self._owned = owned
        self.same_bits = True  # a text's logits have the same bits in every pass, as far as the probe tells
        self._attention: Attention | None = attention
        try:
            self._choose_path()
        except ModelError as error:
            raise ModelError(f"{kind_of(network)} cannot be served: {error}") from error.__cause__
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
        """Load from a path or the hub, to the GPU if there is one; ``loading`` are options of `load`. Raises `ModelError`."""
        return cls(load(source, **loading), owned=True, cache_tokens=cache_tokens, num_threads=num_threads)

    def cut(self, layers: Sequence[int]) -> Self:
        """A model of ``layers`` of this one, on the same weights; raises `ModelError` if it has not all of them.

        There is memory for as many positions as this one has. Both may run at once.
        """
        other = copy.copy(self)
        other._network = cut(self._network, layers)
        other._llama = None if self._llama is None else self._llama.cut(layers)
        other._seen = self._seen.cut(layers)
        other._attention = Native(other._seen, self.dtype) if isinstance(self._attention, Native) else self._attention
        other._busy = threading.Lock()
        other._replay(probe_texts(self.vocab_size))
        return other

    @property
    def context_len(self) -> int:
        """Positions the model was made for, and up to which its logits do not depend on how long the text will be."""
        return context_len(self._network.config)

    @property
    def summary(self) -> str:
        place = devices.processor() if self.device.type == "cpu" else str(self.device)
        bits = "have the same bits in every pass" if self.same_bits else "may differ in their last bits from pass to pass"
        threads = f"; threads of a pass: {self.threads}" if self.device.type == "cpu" else ""
        return f"{str(self.dtype).removeprefix('torch.')} on {place}; logits {bits}{threads}"

    @property
    def num_parameters(self) -> int:
        return int(self._network.num_parameters())

    @property
    def weights_read(self) -> tuple[int, int, int]:
        """How many layers it has, and weights that a pass reads of each and of the output embedding, on the average."""
        layers, head = stack(self._network), self._network.get_output_embeddings()
        count = sum(part.numel() for part in layers.parameters())
        return len(layers), count // len(layers), sum(part.numel() for part in head.parameters())

    def close(self) -> None:
        """Nothing runs outside this process."""

    # passes

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""
        assert self._attention is not None
        return self._attention.new_cache()

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        """See `cascade.scorer.Scorer`. Processors work in `collect`, in the calling thread but without the interpreter."""
        return rows

    def collect(self, launched: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`; one host read, and two for each row with logprobs."""
        rows = launched
        trees = any(row.draft.parents for row in rows)
        with self._busy, self.threads.use(sum(len(row.input_ids) for row in rows)):
            return run_trees(rows, self._score, shares_pass=True) if trees else self._score(rows)

    @torch.inference_mode()
    def _score(self, rows: Sequence[Row], on_scored: Report = report) -> list[Scored]:
        """Own tokens of rows whose drafts are lines; ``on_scored`` is called as `report` is."""
        return scored(self.logits(rows), rows, on_scored)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits ``[sum of num_scored, vocab_size]`` of the rows' last positions."""
        assert self._attention is not None
        packed = Packed.of(rows)
        # one copy to the device for all three
        sent = devices.sent(packed.tokens + packed.positions + packed.keep, self.device)
        n, plan = len(packed.tokens), self._attention.plan(packed.spans, self._seen.windows)
        return self._forward(sent[:n], sent[n : 2 * n], sent[2 * n :], plan)

    def _forward(self, ids: Tensor, positions: Tensor, keep: Tensor, cascade_pass: Any) -> Tensor:
        if self._llama is not None:
            return self._llama(ids, positions, keep, cascade_pass)
        head = self._network.get_output_embeddings()
        with head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, keep], *inputs[1:])):
            inputs = {"input_ids": ids[None], "position_ids": positions[None]}
            out: Tensor = self._network(**inputs, use_cache=False, cascade_pass=cascade_pass).logits[0]
        return out

    def _try(self, num_tokens: int) -> None:
        """A pass whose time tells how many threads are worth it."""
        tokens = [place % self.vocab_size for place in range(min(num_tokens, self.context_len - 1))]
        cache = self.new_cache()
        self._score([Row(cache, 0, tokens, min(len(tokens), SCORED), SamplingParams(temperature=0, seed=0))])
        cache.free()

    # new weights

    def renew(self, source: str) -> None:
        """Use the weights of ``source`` from the next pass on.

        For drafters, whose texts may change. Keys and values of the old weights stay, so drafts after such a text are a little
        worse. Passes go on meanwhile and keep most of the processors: loading takes one thread, which mostly rests. Raises
        `ModelError` if the shapes are others; then nothing has changed.
        """
        with limited(1):
            pace = Pace(RENEWAL_SHARE)
            network = self._other(source, pace)
            llama = None if self._llama is None else Llama(network, owned=True, rest=pace.rest)
            if llama is None:
                multiply_row_by_row(network)
            with self._busy:
                self._network, self._llama = network, llama

    @torch.no_grad()
    def _other(self, source: str, pace: Pace) -> "Network":
        """A network like this one with the weights of ``source``; raises `ModelError`.

        Transformers does not load it: it changes PyTorch's default dtype meanwhile, also for a pass that runs.
        """
        here, head = self._network, self._network.get_output_embeddings()
        network = copied(here)
        for module in network.modules():
            vars(module).pop("forward", None)  # our kernels' forward, on the weights before
        if (draft := isinstance(head, DraftHead)) and draft_ids(converted(source)) != head.ids.tolist():
            raise ModelError(f"The weights of {source!r} cannot take the place of others: they say other tokens")
        shared = {"lm_head.weight", "lm_head.linear.weight"} if draft or here.config.tie_word_embeddings else ()
        with unread(converted(source)) as weights:
            wanted = {name: shape_of(part) for name, part in here.state_dict().items()}
            check_replaces(source, wanted, {name: shape_of(part) for name, part in weights.items()}, shared)
            held = {}
            for name, part in weights.items():
                held[name] = part[...].to(self.device, self.dtype)
                pace.rest()
        network.load_state_dict(held, strict=False, assign=True)
        if draft:
            whole = held.get("lm_head.weight", network.get_input_embeddings().weight)
            network.set_output_embeddings(DraftHead(whole, head.ids))
        else:
            network.tie_weights()
        return network.eval()

    # the probe at load

    @torch.inference_mode()
    def _choose_path(self) -> None:
        """Choose what runs passes; raises `ModelError` if a layer attends otherwise, or if logits are not the network's own."""
        network = self._network
        if problem := unlike_attention(network.config):
            raise ModelError(problem)
        texts = probe_texts(network.get_input_embeddings().weight.shape[0])
        ids = torch.tensor(texts, device=self.device)
        if isinstance(network, Plain):
            expected = network(ids)
        else:
            # every network has "eager", which sums up scores in the network's dtype: too coarse for keys as large as
            # Qwen2.5's; but "sdpa" leaves out softcapping, and before Transformers 5.20 without a word
            capped = getattr(network.config.get_text_config(), "attn_logit_softcapping", None) is not None
            network.set_attn_implementation("sdpa" if network._supports_sdpa and not capped else "eager")
            expected = network(input_ids=ids, use_cache=False).logits
        if not expected.isfinite().all():
            raise ModelError("its logits are not finite numbers")
        self.vocab_size = int(expected.shape[-1])
        try:
            self._choose_attention()
            logits = self._replay(texts)
            assert self._attention is not None
            promised = self._attention.same_bits and keeps_bits(network, self.dtype)  # the probe may miss what experts do
            self.same_bits &= promised and self._repeats(texts)
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
            raise ModelError(f"it does not take packed rows ({reason(error)})") from error
        if not agree(network, logits, expected):
            raise ModelError("its logits change when rows are packed into one input")

    def _choose_attention(self) -> None:
        """How keys and values are held and attended to, and what runs in a pass."""
        network = self._network
        self._seen = network.survey if isinstance(network, Plain) else Survey.of(network)
        if self._attention is None:
            self._attention = Native(self._seen, self.dtype) if self.device.type == "cpu" else Contiguous()
            if is_written_out(network):
                self._llama = Llama(network, owned=self._owned)
        if not isinstance(network, Plain):
            register()
            network.set_attn_implementation(ATTENTION)
        if self._llama is None:
            multiply_row_by_row(network)

    def _replay(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits ``[texts, n, vocab_size]`` of the last positions, after wrong drafts that are rolled back."""
        cut, params = [4, 5], SamplingParams()
        caches = [self.new_cache() for _ in texts]
        drafts = [[*text[:n], *reversed(text)] for text, n in zip(texts, cut, strict=True)]
        self.logits([Row(cache, 0, draft, 1, params) for cache, draft in zip(caches, drafts, strict=True)])
        rows = [Row(cache, n, text[n:], 5, params) for cache, text, n in zip(caches, texts, cut, strict=True)]
        logits = self.logits(rows).view(len(texts), 5, -1)
        self.bytes_per_token = caches[0].nbytes // max(1, caches[0].capacity)
        return logits

    def _repeats(self, texts: Sequence[Sequence[int]]) -> bool:
        """Whether the last token of a text gets the same bits among the others and alone."""
        caches, params, n = [self.new_cache() for _ in texts], SamplingParams(), len(texts[0]) - 1
        together = self.logits([Row(cache, 0, text, len(text), params) for cache, text in zip(caches, texts, strict=True)])
        alone = self.logits([Row(caches[0], n, texts[0][n:], 1, params)])
        for cache in caches:
            cache.free()
        return torch.equal(together[n], alone[0])
