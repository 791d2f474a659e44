"""What this package logs in a replica goes where Ray Serve writes."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from ray import serve

from deployments.replica import OURS, join_serves


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Put them back as they were."""
    before = {name: logging.getLogger(name).parent for name in OURS}
    yield
    for name, parent in before.items():
        logging.getLogger(name).parent = parent


def test_records_reach_serves_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a cluster's logs: what tiers and routers said was in no file, below warnings nowhere at all."""
    serves, records = logging.getLogger("ray.serve"), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(serves, "handlers", [handler])
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="one"))
    before = serves.level
    join_serves()
    serves.setLevel(logging.INFO)
    try:
        logging.getLogger("deployments.router").info("told")
        serves.setLevel(logging.ERROR)  # as Serve does when the configuration changes
        logging.getLogger("cascade.tier.tier").warning("not told")
    finally:
        serves.setLevel(before)
    assert [record.getMessage() for record in records] == ["told"]


def test_other_processes_are_left_alone() -> None:
    """Guards users of the library and tests: outside a replica nothing is changed."""
    join_serves()
    assert logging.getLogger("cascade").parent is logging.getLogger()
