"""The benchmark that runs for long, for some seconds: it must be able to fail."""

import asyncio
from dataclasses import replace

from benchmarks import endurance
from benchmarks.endurance import Ask
from cascade import Cascade, SamplingParams
from deployments.ops.launch import Server
from tests.served.test_serve import PROMPT, alone
from tests.waiting import LONG_S

SECONDS, CLIENTS = 3.0, 3


def test_clients_for_some_seconds(server: Server, reference: Cascade) -> None:
    """Guards the instrument: wrong texts that it took for right ones, or processes and minutes that it did not see."""
    params = SamplingParams(max_tokens=endurance.TOKENS, temperature=0.8, seed=3, ignore_eos=True)
    right = Ask(PROMPT, params, alone(reference, params).text)
    seconds = SECONDS
    while not (course := asyncio.run(endurance.run(server, [right], seconds, CLIENTS, kills=False))).windows[0].token_s:
        seconds *= 2  # on a busy machine no answer ended in that time
        assert seconds < LONG_S
    assert course.faults == []
    assert set(course.ended) <= {"whole", "streamed", "left"}
    assert course.ended["whole"] + course.ended["streamed"] > 0
    assert {kind: len(pids) for kind, pids in endurance.processes().items()} == endurance.WHOLE
    assert endurance.settled() == []
    said = endurance.report(course, [])
    assert said["first"]["token_ms"]["p95"] > 0
    assert set(said["last"]["mib"]) == set(endurance.KINDS)

    wrong = replace(right, text="no " + right.text)
    course = asyncio.run(endurance.run(server, [wrong], 0.1, 1, kills=False))
    assert course.ended["changed"] == len(course.faults) == 1
