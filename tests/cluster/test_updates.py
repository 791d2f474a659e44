"""A served cascade whose configuration is exchanged under load, the way `serve deploy` does it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.cluster.devices import Setup
from cascade import SamplingParams, Speculation
from cascade.client import Client
from cascade.messages import SessionSpec
from cascade.settings.router import ListenConfig
from deployments.app import parse
from deployments.ops.launch import LOOPBACK, free_port
from tests.conftest import Cluster
from tests.toys import full_text
from tests.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # replicas start beside clients that never rest

APPLICATION = "updated"
PROMPT = list(range(20, 60))
PARAMS = SamplingParams(max_tokens=32, temperature=0.8, ignore_eos=True)
NUM_CLIENTS = 4
SEEDS = 3
MORE = 2 * NUM_CLIENTS  # answers after an update

Values = dict[str, Any]


def deploy(values: Values) -> None:
    """What the command does, through the dashboard; returns when the update is over."""
    application = {"name": APPLICATION, "route_prefix": "/updated", "import_path": "deployments.app:build", "args": values}
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    looks: list[bool] = []

    def over() -> bool:
        status = serve.status().applications.get(APPLICATION)
        states = [] if status is None else [state for each in status.deployments.values() for state in each.replica_states]
        looks.append(status is not None and status.status == "RUNNING" and {*states} == {"RUNNING"})
        return looks[-2:] == [True, True]  # the first look may come before Serve has begun

    wait_until(over, serve.status, every_s=1.0)


def pids() -> dict[str, set[int]]:
    deployments = _get_global_client().get_serve_details()["applications"][APPLICATION]["deployments"]
    return {name: {replica["pid"] for replica in deployment["replicas"]} for name, deployment in deployments.items()}


class Served:
    """An application, and clients that ask for answers until they are told to stop, and compare them."""

    def __init__(self, values: Values, address: str) -> None:
        toy, self.values, self.address = Setup().models()[-1], values, address
        specs = [SessionSpec(tuple(PROMPT), len(PROMPT), replace(PARAMS, seed=seed)) for seed in range(SEEDS)]
        self._expected = [full_text(toy, spec)[len(PROMPT) :] for spec in specs]
        self._answers = 0
        self._wrong: list[object] = []
        self.over = threading.Event()

    def ask(self, number: int) -> None:
        with Client(self.address, timeout=LONG_S, patience_s=LONG_S) as client:  # a busy machine may take long for an answer
            while not self.over.is_set():
                number += 1
                params = replace(PARAMS, seed=number % SEEDS)
                try:
                    text = client.generate(PROMPT, params, Speculation(tiers=("tiny", "medium"))).token_ids
                except Exception as error:  # of any kind: no client may see one
                    self._wrong.append(error)
                    continue
                self._answers += 1
                if list(text) != self._expected[number % SEEDS]:
                    self._wrong.append((params.seed, text))

    def update(self, change: Callable[[Values], object]) -> set[str]:
        """Exchange the configuration while clients ask; the deployments whose replicas are others now."""
        before = pids()
        self._more()
        change(self.values)
        deploy(self.values)
        self._more()
        assert self._wrong == []
        after = pids()
        replaced = {name for name in before if before[name] != after[name]}
        assert all(before[name].isdisjoint(after[name]) for name in replaced)
        assert {name: len(own) for name, own in before.items()} == {name: len(own) for name, own in after.items()}
        return replaced

    def _more(self) -> None:
        enough = self._answers + MORE
        wait_until(lambda: self._answers >= enough or self._wrong)


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Served]:
    """Three tiers of toys, of whose full one there are two replicas, on devices that have room for as many again."""
    listen = ListenConfig(grpc_port=free_port(), http_port=free_port())
    values = Setup(stretch=8.0, replicas=(1, 1, 2)).values  # slow devices leave the processor to replicas that start
    checked = {"health_check_timeout_s": LONG_S}  # replicas of a busy machine that answer late are not ill: Serve replaced them
    for tier in values["tiers"]:
        tier["deployment_config"] |= checked
        tier["deployment_config"]["ray_actor_options"]["num_gpus"] = 0.5
    values["router"] = {"listen": listen.model_dump(mode="json"), "held_lease_s": 1.0, "deployment_config": checked}
    made = Served(parse(values).model_dump(mode="json", exclude_none=True), f"{LOOPBACK}:{listen.grpc_port}")
    try:
        deploy(made.values)
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            asking = [threads.submit(made.ask, number) for number in range(NUM_CLIENTS)]
            try:
                yield made
            finally:
                made.over.set()
        for answer in asking:
            answer.result(0)
    finally:
        serve.delete(APPLICATION)


def exchanged(*levels: int) -> Callable[[Values], object]:
    """A change of these tiers; of the last of them the old replicas go first, which is the harder way."""

    def change(values: Values) -> None:
        for level in levels:
            values["tiers"][level]["engine_kwargs"]["max_pass_tokens"] = 256
        values["tiers"][levels[-1]]["deployment_config"]["max_surge_percent"] = 0

    return change


def test_tiers_are_exchanged_and_nobody_notices(served: Served) -> None:
    """Guards new weights of drafters, where everything was replaced, and answers at a full replica: they go on elsewhere."""
    assert served.update(exchanged(0, 1)) == {"tiny", "medium"}
    assert served.update(exchanged(2)) == {"full"}


def test_routers_are_exchanged_and_nobody_notices(served: Served) -> None:
    """Guards clients of a router that is replaced, and routers against going on with values that have changed."""
    assert served.update(lambda values: values["router"].update(tool_format="json")) == {"router"}
    assert served.update(lambda values: values.update(window=9)) == {"router"}
    with Client(served.address) as client:
        assert client.describe().window == 9
