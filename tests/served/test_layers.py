"""A tier of some of the full model's layers, served."""

from copy import deepcopy

from cascade import SamplingParams, Speculation
from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import Server
from tests import small
from tests.conftest import Cluster

PARAMS = SamplingParams(max_tokens=48, temperature=0, seed=3, ignore_eos=True)
PROMPT = "def read(path):\n"


def test_layers_of_the_full_model_draft_for_it(cluster: Cluster) -> None:
    """Guards self-speculation behind the front door: its tier was loaded in one process only, beside the whole model."""
    values = small.config().model_dump(mode="json")
    full = values["tiers"][-1]
    part = {**deepcopy(full), "name": "tiny", "engine_kwargs": {**full["engine_kwargs"], "layers": ["0-3", 5]}}
    with (
        Server.start(CascadeConfig.parse({**values, "tiers": [part, full]}), port=0, name="layers") as server,
        Client(server.address) as client,
    ):
        alone, drafted = (client.generate(PROMPT, PARAMS, how) for how in (Speculation("off"), Speculation(tiers=("tiny",))))
    assert drafted.token_ids == alone.token_ids
    assert sum(edge.accepted for edge in drafted.stats.edges if edge.drafter == "tiny")
