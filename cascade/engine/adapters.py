"""LoRA adapters on a model: every row of a pass names one, or none."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.model import Model
from cascade.errors import InvalidRequest, ModelError, reason
from cascade.scorer import Row, Scored


class AdaptedModel(Model):
    """A model whose rows each use the adapter that ``row.params.adapter`` names; "" is the model itself.

    ``adapters`` are paths or hub ids by name. Those of ``folder`` are loaded by the first pass that needs them, at most
    ``most`` at a time. A pass is one forward for each adapter of its rows. Keys and values depend on the adapter, so prefixes
    must not be shared between adapters.
    """

    _written_out = False  # adapters are Transformers' own layers

    def __init__(
        self,
        network: PreTrainedModel,
        adapters: Mapping[str, str],
        *,
        folder: AdapterFolder | None = None,
        most: int = 16,
        **options: Any,
    ) -> None:
        """As `Model`; raises `ModelError` if the network or an adapter cannot be served."""
        super().__init__(network, **options)
        self._loaded = dict.fromkeys(adapters)  # names; those of the folder in the order of their last use
        self._folder, self._most = folder, most
        self._adapted: list[Any] = []
        for name, source in adapters.items():
            self._load(name, source)
        self._active: str | None = None
        self.switch("")

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of those that are loaded."""
        return tuple(self._loaded)

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`; an adapter that cannot be loaded is its request's fault."""
        scored: list[Scored] = [Scored() for _ in rows]
        for name in dict.fromkeys(row.params.adapter for row in rows):
            places = [place for place, row in enumerate(rows) if row.params.adapter == name]
            with self._busy:
                self.switch(name)
                found = super().run([rows[place] for place in places])
            for place, result in zip(places, found, strict=True):
                scored[place] = result
        return scored

    def switch(self, name: str) -> None:
        """Let the next forward use an adapter."""
        if name == self._active:
            return
        if name and name not in self._loaded:
            if self._folder is None:
                raise ModelError(f"adapter is {name!r}: it must be one of {', '.join(self._loaded)}")
            self._load_from_folder(name, self._folder.place(name))
        if name and self._folder is not None:
            self._loaded[name] = self._loaded.pop(name)
        self._activate(name)
        self._active = name

    def _load_from_folder(self, name: str, source: str) -> None:
        """Load an adapter, if needed in place of the least recently used one; raises `InvalidRequest`."""
        self._active = None
        if len(self._loaded) >= self._most:
            self._drop(next(iter(self._loaded)))
        self._loaded[name] = None
        try:
            self._load(name, source)
        except Exception as error:
            self._drop(name)
            if isinstance(error, ModelError):
                raise InvalidRequest(str(error)) from error
            raise

    def _drop(self, name: str) -> None:
        """Free an adapter, which may be half loaded."""
        from peft.functional import delete_adapter

        del self._loaded[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Adapter .* was active")  # the next switch chooses
            delete_adapter(self._network, name, prefix="lora_")
        getattr(self._network, "peft_config", {}).pop(name, None)
        self._adapted = _adapted(self._network)

    def _activate(self, name: str) -> None:
        """Let all adapted modules use an adapter, or none if it is "".

        Transformers' own ``set_adapter`` is not used: since 5.24 it asks for a PEFT that is not published yet.
        """
        for layer in self._adapted:
            layer.enable_adapters(enabled=bool(name))
            if name:
                layer.set_adapter(name)

    def _load(self, name: str, source: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are meant
                report = self._network.load_adapter(source, adapter_name=name)
        except Exception as error:  # of any library
            raise ModelError(f"The adapter {name!r} cannot be loaded from {source!r}: {reason(error)}") from error
        absent = {key for key in report.missing_keys if f".{name}." in key}  # those of other adapters are reported, too
        if odd := absent | {*report.unexpected_keys, *map(str, report.mismatched_keys)}:
            raise ModelError(f"The adapter {name!r} of {source!r} was made for another model: {len(odd)} weights do not fit")
        self._adapted = _adapted(self._network)
        try:
            self._activate(name)
            self._choose_path()
        except ModelError as error:
            raise ModelError(f"The adapter {name!r} of {source!r} cannot be served: {error}") from error.__cause__


def _adapted(network: PreTrainedModel) -> list[Any]:
    """Modules of a network that adapters are attached to."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # only those who serve adapters have it installed
    from peft.utils import ModulesToSaveWrapper

    return [module for module in network.modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)]
