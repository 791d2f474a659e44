"""All that is to be known of a GPU, in a quarter of an hour: ``python -m benchmarks.gpu [STEP ...] --out FOLDER``.

Each step runs in a process of its own and has a limit of time. One that fails or takes longer says why, and the next begins.
FOLDER gets NAME.json, NAME.log and the logs of Ray for each step, and programme.json for all, those of earlier runs into it
among them. ``--small`` is for a machine without a GPU: the same steps on vLLM's build for CPUs, with few tokens and longer
limits.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.document import console, keep, stamp
from benchmarks.gpu import inflate
from benchmarks.gpu.step import STEPS, Step

ROOT = Path(__file__).parents[2]
SLOWER = 10.0  # times the limit of a GPU, on CPUs
PARTING_S = 15.0  # for a step whose time is over, to stop what it has started
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}  # on CPUs, where compiling takes minutes
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def environment(step: Step, work: Path, *, small: bool) -> dict[str, str]:
    """Of a step's process: no network, caches and Ray's files in ``work``, and the loader of inflated models."""
    paths = [inflate.plugin(work / "plugin"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    mine = {"PYTHONPATH": ":".join(paths), "RAY_TMPDIR": str(work / step.name)}
    mine |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    mine |= {name: str(work / folder) for name, folder in CACHES.items()}
    return {**os.environ, **mine, **(UNCOMPILED if small else step.variables)}


def attempt(step: Step, out: Path, work: Path, limit_s: float, *, small: bool) -> dict[str, Any]:
    """Run a step; returns how long it took, and its problem if it has one."""
    command = [sys.executable, "-m", "benchmarks.gpu.step", step.name, "--out", str(out), *["--small"] * small]
    log, begin = out / f"{step.name}.log", time.perf_counter()
    (work / step.name).mkdir()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment(step, work, small=small), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    problem = None
    try:
        if process.wait(limit_s):
            problem = f"ended with {process.returncode}: {_last_line(log)}"
    except subprocess.TimeoutExpired:
        problem = f"took longer than {limit_s:.0f} s"
    finally:
        _end(process)
        for logs in (work / step.name).glob("ray/session_2*/logs"):
            with suppress(OSError):  # what still runs may write and remove
                shutil.copytree(logs, out / f"{step.name}.ray", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        shutil.rmtree(work / step.name, ignore_errors=True)
    return {"seconds": round(time.perf_counter() - begin, 1), "problem": problem}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let a step stop what it has started, then kill what is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PARTING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "without a word"


def main(arguments: Sequence[str] | None = None) -> None:
    names = [step.name for step in STEPS]
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What one GPU shows of cascade.")
    made.add_argument("steps", nargs="*", metavar="STEP", help=f"all unless given: {', '.join(names)}")
    made.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    made.add_argument("--small", action="store_true", help="few tokens, on vLLM's build for CPUs")
    chosen = made.parse_args(arguments)
    if unknown := sorted({*chosen.steps} - {*names}):
        made.error(f"there is no step {unknown[0]!r}: choose from {', '.join(names)}")
    out: Path = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    memory, document = Path("/dev/shm"), out / "programme.json"
    results: dict[str, Any] = json.loads(document.read_text())["steps"] if document.exists() else {}
    ran = []
    # a short path: sockets below it have names of a hundred characters at most
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=memory if memory.is_dir() and not chosen.small else None) as work:
        for step in STEPS:
            if chosen.steps and step.name not in chosen.steps:
                continue
            limit_s = step.limit_s * (SLOWER if chosen.small else 1.0)
            results[step.name] = attempt(step, out, Path(work), limit_s, small=chosen.small)
            console.print(step.name, results[step.name])
            ran.append(step.name)
            figures = {name: json.loads(path.read_text()) for name in results if (path := out / f"{name}.json").exists()}
            keep({"steps": results, "small": chosen.small, "found": figures} | stamp(), document)
    problems = {name: results[name]["problem"] for name in ran if results[name]["problem"]}
    print(json.dumps({"problems": problems, "out": str(out)}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
