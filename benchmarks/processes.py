"""The library with its lower tiers as threads of one process, and as processes, side by side; and the hop between two.

    python -m benchmarks.processes [rounds]

Both cascades of the demonstration family are there all the time and take turns, request by request. The last line is JSON.
"""

import json
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cascade import Cascade, SamplingParams, Speculation
from cascade.chain.tier import Tier
from cascade.messages import Message, Open
from cascade.processes.links import Downlink, Uplink
from cascade.simulation.toy import ToyModel

PINGS = 2000
TOKENS = 128
TEMPERATURES = (0.0, 0.8)
PROMPTS = (
    'def fibonacci(n):\n    """Return the n-th number."""\n',
    "import os\nimport sys\n\ndef walk(folder):\n    for name in os.listdir(folder):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def parse(line):\n    parts = line.split(',')\n    return {\n",
)
MODES = {
    "full": Speculation("off"),
    "auto": Speculation(),
    "tiny and full": Speculation(tiers=("tiny",)),
    "all": Speculation(tiers=("tiny", "medium")),
}


def answer(descriptor: int) -> None:
    """Be the other process of `hop`, with a toy model."""
    tier, ended = Tier("toy", 0, ToyModel()), threading.Event()
    tier.start()
    Uplink(socket.socket(fileno=descriptor), tier, ended=lambda _: ended.set())
    ended.wait()


def hop() -> dict[str, float]:
    """Half of an Open and its Proposal: milliseconds in all, and of this process's own time."""
    inbox: queue.SimpleQueue[Sequence[Message]] = queue.SimpleQueue()
    link = Downlink(inbox.put)
    above, below = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.processes", "answer", str(below.fileno())]
    other = subprocess.Popen(command, pass_fds=[below.fileno()])
    below.close()
    link.attach("toy", above)
    params = SamplingParams(max_tokens=1, temperature=0, seed=0)
    link.send([Open("first", (1, 2), 2, params, tier="toy")])
    inbox.get()
    times, own = [], time.process_time()
    for ping in range(PINGS):
        begin = time.perf_counter()
        link.send([Open(str(ping), (1, 2), 2, params, tier="toy")])
        inbox.get()
        times.append((time.perf_counter() - begin) / 2)
    own = (time.process_time() - own) / (2 * PINGS)
    link.close()
    other.wait()
    return {"hop_ms": round(1e3 * statistics.median(times), 3), "own_ms": round(1e3 * own, 3)}


def rate(cascade: Cascade, prompt: str, temperature: float, speculation: Speculation) -> tuple[float, str]:
    """Tokens a second, and the text."""
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=3, ignore_eos=True)
    begin = time.perf_counter()
    completion = cascade.generate(prompt, params, speculation)
    return TOKENS / (time.perf_counter() - begin), completion.text


def compare(rounds: int) -> dict[str, Any]:
    """Medians over all prompts and rounds, by temperature, mode and where the lower tiers live."""
    found: dict[tuple[float, str, str], list[float]] = defaultdict(list)
    with Cascade.demo(processes=False) as threads, Cascade.demo(processes=True) as processes:
        both = {"threads": threads, "processes": processes}
        for cascade in both.values():  # to warm up
            for speculation in MODES.values():
                rate(cascade, PROMPTS[0], 0.0, speculation)
        for temperature in TEMPERATURES * rounds:
            for prompt in PROMPTS:
                texts = set()
                for mode, speculation in MODES.items():
                    for place, cascade in both.items():
                        speed, text = rate(cascade, prompt, temperature, speculation)
                        texts.add(text)
                        found[temperature, mode, place].append(speed)
                assert len(texts) == 1, "a text differs"
    return {
        str(temperature): {
            mode: {place: round(statistics.median(found[temperature, mode, place])) for place in both} for mode in MODES
        }
        for temperature in TEMPERATURES
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["answer"]:
        answer(int(sys.argv[2]))
    else:
        rounds = int(sys.argv[1]) if sys.argv[1:] else 3
        print(json.dumps({**hop(), "rounds": rounds, "tokens_per_s": compare(rounds)}))
