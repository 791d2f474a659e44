"""One batched pass: rows of any sessions from any positions, packed into one input of a network, ours or Transformers'."""

import copy
import inspect
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cascade.engine import devices
from cascade.engine.draft_vocab import DraftHead, draft_ids
from cascade.engine.gguf import converted
from cascade.engine.heads.checkpoint import read
from cascade.engine.heads.exit import Exit
from cascade.engine.heads.head import Head
from cascade.engine.heads.loading import load_head
from cascade.engine.heads.mtp import Mtp, check_mtp
from cascade.engine.heads.reader import Reader
from cascade.engine.loading import load
from cascade.engine.model_config import context_len, unlike_attention
from cascade.engine.network.attention import ATTENTION, Attention, Native
from cascade.engine.network.contiguous import Contiguous
from cascade.engine.network.llama import Llama, is_written_out
from cascade.engine.network.products import keeps_bits, multiply_row_by_row
from cascade.engine.network.survey import Survey, agree, probe_texts
from cascade.engine.sampling.processors import report
from cascade.engine.scoring import Packed, Report, scored
from cascade.engine.threads import Threads
from cascade.engine.trees import run_trees
from cascade.errors import ModelError, reason
from cascade.params import SamplingParams
from cascade.scorer import UNREAD, Row, Scored

SCORED = 16  # own tokens of a timed pass, at most


class Model:
    """A causal language model that scores packed rows; see `cascade.scorer.Scorer`."""

    _written_out = True  # where it can be

    def __init__(
        self,
        network: PreTrainedModel,
        *,
        cache_tokens: int | None = None,
        gpu_memory_utilization: float = devices.UTILIZATION,
        attention: Attention | None = None,
        num_threads: int | None = None,
        head: Head | None = None,
        owned: bool = False,
    ) -> None:
        """Take over a loaded network; raises `ModelError` if it cannot take the path.

        There is memory for ``cache_tokens`` positions of keys and values; without a number, for as many as the device has
        room for, see `cascade.engine.devices.cache_tokens`. ``attention`` is the device's unless it is given; models do not
        share one.
        Passes on a CPU take ``num_threads``; without a number, as many of those PyTorch may use as they are worth, see
        `cascade.engine.threads`. ``head`` guesses after rows that want it. If the network is ``owned``, used by nobody else,
        it loses the weights that are held in another order.
        """
        self._network = network.eval()
        self._keeps_logits = "logits_to_keep" in inspect.signature(network.forward).parameters
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        devices.add_exactly(self.device)
        self._vocab_size = self.bytes_per_token = 0
        self._windows: dict[int, int | None] = {}  # by layer, see `cascade.engine.network.survey.Survey`
        self._busy = threading.RLock()  # tiers may share a model, and its passes share memory
        self._llama: Llama | None = None  # in the place of the network
        self._owned = owned
        self.same_bits = True  # in every pass, whatever shares it: logits of a text, as far as the probe tells
        self._attention: Attention = attention or Contiguous()  # our own on a CPU, see `_choose_attention`
        self._chosen = attention is not None
        try:
            self.reader = Reader(head, network) if head is not None else None
            self._choose_path()
        except ModelError as error:
            raise ModelError(f"{type(network).__name__} cannot be served: {error}") from error.__cause__
        self.cache_tokens = cache_tokens or devices.cache_tokens(self.device, self.bytes_per_token, gpu_memory_utilization)
        self.threads: Threads = self._counted(num_threads)

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        *,
        dtype: str | None = None,
        device: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache_tokens: int | None = None,
        gpu_memory_utilization: float = devices.UTILIZATION,
        num_threads: int | None = None,
        drafter: str | None = None,
        drafter_kind: str = "auto",
        drafter_layers: int | None = None,
    ) -> Self:
        """Load from a path or the hub, to the GPU if there is one; raises `ModelError`.

        ``dtype`` is the checkpoint's, or float32 on processors without bfloat16, see `load`; ``drafter`` is the path or hub id
        of a head that guesses for it, ``drafter_kind`` its kind, such as "eagle3", where it shall be no other; MTP layers of
        the model's own checkpoint are the drafter "" of kind "mtp". A head of kind "exit" has no files, but runs the first
        ``drafter_layers``. The rest is for the model itself.
        """
        if drafter == "" and drafter_kind == Mtp.kind:
            check_mtp(source, revision=revision, trust_remote_code=trust_remote_code)
        network = load(
            source,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        memory: dict[str, Any] = {"cache_tokens": cache_tokens, "gpu_memory_utilization": gpu_memory_utilization}
        chosen = (drafter, drafter_kind, drafter_layers)
        return cls.drafting(network, *chosen, num_threads=num_threads, owned=True, **memory)

    @classmethod
    def drafting(
        cls,
        network: PreTrainedModel,
        drafter: str | None,
        drafter_kind: str = "auto",
        layers: int | None = None,
        **options: Any,
    ) -> Self:
        """Take over a loaded network and its head, see `from_pretrained`, if there is one; raises `ModelError`."""
        head: Head | None = None
        if drafter_kind == Exit.kind and layers is not None:
            head = Exit(network, layers)
        elif layers is not None or drafter_kind == Exit.kind:
            raise ModelError(
                f"drafter_kind is {drafter_kind!r} and drafter_layers {layers}: 'exit' needs layers, others do not"
            )
        elif drafter is not None:
            head = load_head(drafter, network, kind=drafter_kind)
        return cls(network, head=head, **options)

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding, padding included."""
        return self._vocab_size

    @property
    def context_len(self) -> int:
        """Positions the model was made for, and up to which its logits do not depend on how long the text will be."""
        return context_len(self._network.config)

    @property
    def drafter(self) -> str:
        return self.reader.head.kind if self.reader is not None else ""

    @property
    def guess_cost(self) -> float:
        """Of its head, as a share of a pass; 0 where that is not known."""
        return self.reader.head.cost if self.reader is not None else 0.0

    @property
    def summary(self) -> str:
        place = devices.processor() if self.device.type == "cpu" else str(self.device)
        bits = "have the same bits in every pass" if self.same_bits else "may differ in their last bits from pass to pass"
        return f"{str(self.dtype).removeprefix('torch.')} on {place}; logits {bits}"

    @property
    def num_parameters(self) -> int:
        return int(self._network.num_parameters())

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, as they are held, those of its head included."""
        own = self.reader.head.parameters() if self.reader is not None else ()
        return sum(map(nbytes, (*self._network.parameters(), *own)))

    @property
    def healthy(self) -> bool:
        """False once no pass will succeed any more."""
        return True

    def close(self) -> None:
        """End what runs outside this process: nothing does."""

    def renew(self, source: str) -> None:
        """Go on with the weights of ``source``, from the next pass on: those of the head if there is one, else the model's own.

        For drafters, whose texts may change. Keys and values stay, though they are of the weights before: what is drafted after
        such a text is worth a little less. Raises `ModelError` if the shapes are others; then nothing has changed.
        """
        if self.reader is not None:
            head = load_head(source, self._network, kind=self.reader.head.kind)
            with self._busy:
                self.reader.renew(head)
            return
        network = self._other(source)
        llama = None if self._llama is None else Llama(network, owned=True)
        if llama is None:
            multiply_row_by_row(network)
        with self._busy:
            self._network, self._llama = network, llama

    @torch.no_grad()
    def _other(self, source: str) -> PreTrainedModel:
        """A network like this one with the weights of ``source``; raises `ModelError`.

        Transformers does not load it: it changes PyTorch's default dtype meanwhile, also for a pass that runs.
        """
        here, weights = self._network, read(converted(source)).weights
        memo: dict[int, Any] = {id(part): part for part in (*here.parameters(), *here.buffers())}
        memo |= {id(kept): None for module in here.modules() if (kept := vars(module).get("forward")) is not None}
        network = copy.deepcopy(here, memo)
        for module in network.modules():
            vars(module).pop("forward", None)  # by our kernels, on the weights before
        wanted = {name: part.shape for name, part in here.state_dict().items()}
        given = {name: part.shape for name, part in weights.items()}
        head = here.get_output_embeddings()
        draft = isinstance(head, DraftHead)
        if draft and draft_ids(converted(source)) != head.ids.tolist():
            raise ModelError(f"The weights of {source!r} cannot take the place of others: they say other tokens")
        if draft or here.config.tie_word_embeddings:
            for name in ("lm_head.weight", "lm_head.known.weight"):
                wanted.pop(name, None)
                given.pop(name, None)
        if wrong := next((name for name in (*wanted, *given) if wanted.get(name) != given.get(name)), None):
            raise ModelError(f"The weights of {source!r} cannot take the place of others: {wrong} is not the same there")
        held = {name: part.to(self.device, self.dtype) for name, part in weights.items()}
        network.load_state_dict(held, strict=False, assign=True)
        if draft:
            whole = held.get("lm_head.weight", network.get_input_embeddings().weight)
            network.set_output_embeddings(DraftHead(whole, head.ids))
        else:
            network.tie_weights()
        return network.eval()

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""
        return self._attention.new_cache()

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`; one host read, and two for each row with logprobs."""
        trees = any(row.draft.parents for row in rows)
        with self._busy, self.threads.use(sum(len(row.input_ids) for row in rows)):
            found = run_trees(rows, self._score, shares_pass=True) if trees else self._score(rows)
            return found if self.reader is None else self.reader.draft(rows, found)

    def _counted(self, num_threads: int | None) -> Threads:
        if num_threads is not None or self.device.type != "cpu":
            return Threads(num_threads or torch.get_num_threads())
        return Threads.find(self._try, torch.get_num_threads())

    def _try(self, num_tokens: int) -> None:
        tokens = [place % self.vocab_size for place in range(min(num_tokens, self.context_len - 1))]
        cache = self.new_cache()
        self._score([Row(cache, 0, tokens, min(len(tokens), SCORED), SamplingParams(temperature=0, seed=0))])
        cache.free()

    @torch.inference_mode()
    def _score(self, rows: Sequence[Row], on_scored: Report = report) -> list[Scored]:
        """Own tokens of rows whose drafts are lines; ``on_scored`` is called as `report` is."""
        return scored(self.logits(rows), rows, on_scored)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits ``[sum of num_scored, vocab_size]`` of the rows' last positions."""
        packed = Packed.of(rows)
        # one copy to the device for all three
        sent = torch.tensor(packed.tokens + packed.positions + packed.keep).to(self.device, non_blocking=True)
        n, plan = len(packed.tokens), self._attention.plan(packed.spans, self._windows)
        logits = self._forward(sent[:n], sent[n : 2 * n], sent[2 * n :], plan)
        if self.reader is not None:
            self.reader.finish_pass(packed.spans if any(row.guesses != UNREAD for row in rows) else (), plan)
        return logits

    def _forward(self, ids: Tensor, positions: Tensor, keep: Tensor, cascade_pass: Any) -> Tensor:
        if self._llama is not None:
            reads = self.reader.head.reads if self.reader is not None else ()
            logits, hidden = self._llama(ids, positions, keep, cascade_pass, reads=reads)
            if self.reader is not None:
                self.reader.record(hidden)
            return logits
        inputs = {"input_ids": ids[None], "position_ids": positions[None]}
        call = partial(self._network, **inputs, use_cache=False, cascade_pass=cascade_pass)
        if self._keeps_logits:
            return call(logits_to_keep=keep).logits[0]
        head = self._network.get_output_embeddings()
        with head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, keep], *inputs[1:])):
            out = call().logits[0]
        return out

    @torch.inference_mode()
    def _choose_path(self) -> None:
        """Choose what runs passes; raise if not all layers attend as we need it, or if logits are other ones then."""
        network = self._network
        if problem := unlike_attention(network.config):
            raise ModelError(problem)
        network.set_attn_implementation("eager")  # the one that every network has
        texts = probe_texts(network.get_input_embeddings().weight.shape[0])
        expected = network(input_ids=torch.tensor(texts, device=self.device), use_cache=False).logits
        if not expected.isfinite().all():
            raise ModelError("its logits are not finite numbers")
        self._vocab_size = int(expected.shape[-1])
        try:
            self._choose_attention()
            found = self._replay(texts)
            promised = self._attention.same_bits and keeps_bits(network, self.dtype)  # the probe may miss what experts do
            self.same_bits &= promised and self._repeats(texts)
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
            raise ModelError(f"it does not take packed rows ({reason(error)})") from error
        if not agree(network, found, expected):
            raise ModelError("its logits change when rows are packed into one input")

    def _choose_attention(self) -> None:
        """How keys and values are held and attended to, and what runs in a pass."""
        network, seen = self._network, Survey.of(self._network)
        if self.reader is not None:
            self.reader.add_layers(seen)
        self._windows = seen.windows
        if not self._chosen:
            if self.device.type == "cpu":
                self._attention = Native(seen, self.dtype)
            self._chosen = True
            if self._written_out and is_written_out(network):
                self._llama = Llama(network, owned=self._owned)
        network.set_attn_implementation(ATTENTION)
        if self._llama is None:
            multiply_row_by_row(network)
        if self.reader is not None:
            self.reader.attach(self._attention, self._windows, self._llama)

    def _replay(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits ``[texts, n, vocab_size]`` of the last positions, after wrong drafts that are rolled back."""
        cut, params = [4, 5], SamplingParams()
        caches = [self.new_cache() for _ in texts]
        drafts = [[*text[:n], *reversed(text)] for text, n in zip(texts, cut, strict=True)]
        self.logits([Row(cache, 0, draft, 1, params) for cache, draft in zip(caches, drafts, strict=True)])
        rows = [Row(cache, n, text[n:], 5, params) for cache, text, n in zip(caches, texts, cut, strict=True)]
        logits = self.logits(rows).view(len(texts), 5, -1)
        if self.reader is not None:  # which takes memory of its own
            self.reader.draft(rows, [Scored() for _ in rows])
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


def nbytes(weight: Tensor) -> int:
    """Memory of a weight, of what it is packed into if its checkpoint is quantised."""
    if hasattr(weight, "__tensor_flatten__"):  # torchao's tensors consist of others
        return sum(nbytes(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])
    state = getattr(weight, "quant_state", None)  # bitsandbytes keeps scales beside
    return weight.nbytes + (state.absmax.nbytes if state is not None else 0)
