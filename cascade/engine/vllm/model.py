"""A model on vLLM for a tier: a `cascade.scorer.Scorer` over vLLM's blocks."""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cascade.cpu.cache import Packed
from cascade.drafters import DrafterSpec
from cascade.engine import draft_vocab
from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.gguf import converted
from cascade.engine.model_config import read_config
from cascade.engine.sampling.own_tokens import Report, choices, scored, unpacked
from cascade.engine.sampling.state import report
from cascade.engine.trees import run_trees
from cascade.engine.vllm import batch_invariant
from cascade.engine.vllm.blocks import RESERVED, Blocks, PagedCache
from cascade.engine.vllm.engine import check_options, pass_options, shut_down, start
from cascade.engine.vllm.heads import readers, reading, with_drafts
from cascade.engine.vllm.worker import Batch, Facts, Failure, HostCopy
from cascade.engine.weights import HEAD, check_replaces, shapes
from cascade.errors import InvalidRequest, ModelError, model_errors
from cascade.scorer import Row, Runs, Scored


@dataclass(frozen=True, slots=True)
class Launched:
    """A running pass, or one that `VllmModel.collect` begins."""

    rows: Sequence[Row]
    output: Any = None  # logits, own tokens, or a `HostCopy` of them


class VllmModel(Runs):
    """A causal language model that vLLM runs; see `cascade.scorer.Scorer`.

    The last bits of a text's logits depend on the other rows of its pass, unless vLLM runs batch-invariant
    (``VLLM_BATCH_INVARIANT=1``); see `same_bits`.
    """

    def __init__(
        self,
        source: str,
        *,
        cache_tokens: int | None = None,
        adapters: Mapping[str, str] | None = None,
        folder: AdapterFolder | None = None,
        most: int = 16,
        draft: bool = False,
        drafter: DrafterSpec | None = None,
        layers: Sequence[int] = (),
        max_pass_tokens: int = 512,
        max_sessions: int = 256,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load from a path or the hub; raises `ModelError` if vLLM cannot, and `ConfigError` if it is not installed.

        ``cache_tokens`` is the number of positions of keys and values; if ``None``, as many as vLLM finds room for.
        ``adapters`` are paths or hub ids of LoRA adapters, by the names that `SamplingParams.adapter` has. Those of ``folder``
        are loaded by the first pass that needs them, ``most`` at a time, from the folder's copies. A ``draft`` model predicts
        only its draft vocabulary, and scores rows of adapters that it lacks without an adapter. ``drafter`` is a head that
        guesses after its texts. Only weights of ``layers`` are read. Graphs are captured for passes of ``max_pass_tokens`` and
        ``max_sessions``, see `pass_options`. ``options`` are vLLM's engine arguments by their own names (``dtype``,
        ``quantization``, ``max_model_len``, ...), see `check_options`.
        """
        options = dict(options or {})
        check_options(options)
        self._folder, self._draft, self._source = folder, draft, converted(source)
        self._draft_ids: Tensor | None = None  # int64, if the model predicts only these
        self._most = len(adapters or ()) if folder is None else most
        self.drafter = "" if drafter is None else drafter.kind
        options = pass_options(max_pass_tokens, max_sessions, options) | options
        self._engine = start(
            self._source, options, cache_tokens=cache_tokens, num_adapters=self._most, layers=layers, drafter=drafter
        )
        self._busy = threading.Lock()  # workers process one call after the other
        self._stream: torch.cuda.Stream | None = None
        facts: Facts = self._call("cascade_facts")[0]
        self._numbers: dict[str, int] = {}  # adapters' numbers by name, the least recently used first
        try:
            self._prepare(source, facts, adapters or {}, options)
        except ModelError:
            shut_down(self._engine)
            raise
        config = self._engine.vllm_config
        self._ranks: int = config.parallel_config.world_size
        self.device, self.dtype, self.num_parameters = facts.device, facts.dtype, facts.num_parameters
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.context_len: int = config.model_config.max_model_len
        self.same_bits, self._facts = batch_invariant(), facts
        self._blocks = Blocks(facts.num_blocks, facts.block)
        self.cache_tokens = (facts.num_blocks - RESERVED) * facts.block
        self.healthy = True
        # with several ranks, results come through pipes, for which `launch` would wait, and no GPU is this process's
        self._ahead = self.device.type == "cuda" and self._ranks == 1
        if self._ahead:  # tiers of one process do not wait for each other's passes
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # weights and caches exist from then on

    def _prepare(self, source: str, facts: Facts, adapters: Mapping[str, str], options: Mapping[str, Any]) -> None:
        """Prepare the loaded model; raises `ModelError` if it cannot be a tier."""
        if facts.problem is not None:
            raise ModelError(f"{source!r} cannot be a tier on vLLM: {facts.problem}; set engine to 'cascade'")
        if self._draft:
            revision, trust = options.get("revision"), options.get("trust_remote_code", False)
            config = read_config(self._source, revision=revision, trust_remote_code=trust)
            self._draft_ids = draft_vocab.tokens(config, self._source, revision=revision)
        if self._draft_ids is not None:
            self._call("cascade_restrict", self._draft_ids.tolist())
        for name, adapter in adapters.items():
            self._add(name, adapter)

    def _add(self, name: str, source: str) -> None:
        """Load an adapter, which replaces the least recently used one; raises `ModelError`."""
        from vllm.lora.request import LoRARequest

        if len(self._numbers) >= self._most:
            self._call("remove_lora", self._numbers.pop(next(iter(self._numbers))))
        number = min({*range(1, self._most + 1)} - {*self._numbers.values()})
        with model_errors(f"The adapter {name!r} cannot be loaded from {source!r}"):
            self._call("add_lora", LoRARequest(name, number, source))
        self._numbers[name] = number

    def _need(self, rows: Sequence[Row]) -> None:
        """Load the adapters of these rows that are missing; raises `InvalidRequest` if one cannot be loaded."""
        for name in dict.fromkeys(row.params.adapter for row in rows if row.params.adapter):
            if name in self._numbers:
                self._numbers[name] = self._numbers.pop(name)
                continue
            assert self._folder is not None, f"adapter {name!r} is not known"
            try:
                self._add(name, self._folder.place(name))
            except ModelError as error:
                raise InvalidRequest(str(error)) from error

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._numbers)

    @property
    def summary(self) -> str:
        bits = "have the same bits in every pass" if self.same_bits else "may differ in their last bits from pass to pass"
        shared = f", {self._ranks} ranks" if self._ranks > 1 else ""
        place = f"{str(self.dtype).removeprefix('torch.')} on {self.device}, vLLM's {self._facts.backend}{shared}"
        return f"{place}, {self._facts.num_blocks} blocks of {self._facts.block}; logits {bits}"

    def new_cache(self) -> PagedCache:
        """Keys and values of a new session: a table of vLLM's blocks."""
        return PagedCache(self._blocks)

    def renew(self, source: str) -> None:
        """Use the weights of ``source`` from the next pass on, see `cascade.engine.model.Model.renew`.

        vLLM overwrites the old ones while no pass runs. Raises `ModelError` if their shapes differ, before anything is changed,
        or if vLLM cannot read them: then passes fail until it gets complete weights.
        """
        source = converted(source)
        check_replaces(source, shapes(self._source), shapes(source), {HEAD})
        draft_vocab.check_same(source, self._draft_ids)
        with model_errors(f"vLLM cannot take the weights of {source!r}"):
            self._call("reload_weights", weights_path=source)

    def launch(self, rows: Sequence[Row]) -> Launched:
        """See `cascade.scorer.Scorer`. A GPU computes from here on; a CPU computes in `collect`."""
        if not self._ahead or self._several(rows) or any(row.draft.parents for row in rows):
            return Launched(rows)
        with torch.cuda.stream(self._stream):
            return self._begin(rows)

    def collect(self, launched: Launched) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`. One host read; more if the adapters do not fit into one pass."""
        rows = launched.rows
        if launched.output is None and self._several(rows):
            first = {"", *[*dict.fromkeys(row.params.adapter for row in rows if row.params.adapter)][: self._most]}
            fitting = iter(self.run([row for row in rows if row.params.adapter in first]))
            others = iter(self.run([row for row in rows if row.params.adapter not in first]))
            return [next(fitting if row.params.adapter in first else others) for row in rows]
        with torch.cuda.stream(self._stream):  # does nothing on a CPU
            if any(row.draft.parents for row in rows):
                results = run_trees(rows, lambda lines, seen: self._end(self._begin(lines), seen), shares_pass=False)
            else:
                results = self._end(launched if launched.output is not None else self._begin(rows), report)
            return self._guess(rows, results) if self.drafter else results

    def _several(self, rows: Sequence[Row]) -> bool:
        """Whether the adapters of these rows do not fit into one pass."""
        return self._folder is not None and len({row.params.adapter for row in rows} - {""}) > self._most

    def _begin(self, rows: Sequence[Row]) -> Launched:
        """Begin a pass. It also chooses own tokens, unless they depend on a state, which `settle` of a tier may still read."""
        if self._folder is not None:
            self._need(rows)
        return Launched(rows, self._run(rows, choose=not any(row.state is not None and row.num_scored for row in rows)))

    def _end(self, launched: Launched, on_scored: Report) -> list[Scored]:
        rows, output = launched.rows, launched.output
        if isinstance(output, Tensor):
            return scored(output, rows, on_scored)
        packed: list[list[int]] = output.read() if isinstance(output, HostCopy) else output
        return list(unpacked(packed, rows, [row.num_scored for row in rows]))

    def _guess(self, rows: Sequence[Row], results: list[Scored]) -> list[Scored]:
        """Let the head read the tokens of a pass, and guess after rows that request it."""
        if not (texts := readers(rows, results)):
            return results
        [steps] = self._call("cascade_propose", reading([*texts.values()]))
        return with_drafts(results, texts, steps)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits ``[sum of num_scored, vocab_size]`` of the rows' last positions."""
        logits: Tensor = self._run(rows, choose=False)
        return logits

    def _run(self, rows: Sequence[Row], *, choose: bool) -> Any:
        """Logits, or own tokens if the workers are to ``choose``, see `cascade.engine.vllm.worker.CascadeWorker`."""
        packed = Packed.of(rows)
        for row in rows:
            row.cache.prepare(row.start, row.start + len(row.input_ids))
        numbers = {"": 0, **self._numbers}
        if self._draft:
            numbers = defaultdict(int, numbers)
        batch = Batch(
            tokens=packed.tokens,
            starts=[row.start for row in rows],
            lengths=[len(row.input_ids) for row in rows],
            tables=[row.cache.table[: -(-(row.start + len(row.input_ids)) // self._blocks.block)] for row in rows],
            keep=packed.keep,
            adapters=[numbers[row.params.adapter] for row in rows] if self._most else [],
            choices=choices(rows) if choose else None,
            runner_ups=max((row.runner_ups for row in rows), default=0),
        )
        if self._blocks.copies:  # only once, even if the pass is repeated: it may write into their sources
            self._call("cascade_copy", self._blocks.copies)
            self._blocks.copies.clear()
        return next(output for output in self._call("cascade_score", batch) if output is not None)

    def _call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """What a method of vLLM's workers says on each rank, after what they were called for before; raises what it raises."""
        with self._busy, torch.cuda.stream(self._stream):
            answers = self._engine.collective_rpc("cascade_call", args=(method, *args), kwargs=options)
        for answer in answers:
            if isinstance(answer, Failure):
                raise answer.error
        return list(answers)

    def close(self) -> None:
        """End the other ranks; memory is released once all models of this process are closed."""
        if self.healthy:
            self.healthy = False
            shut_down(self._engine)
