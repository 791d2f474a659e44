"""How much memory is free on this machine. Does not import PyTorch."""

import contextlib
import os
from pathlib import Path

GIB = 2**30


def host_memory() -> int:
    """Bytes that this process may still take, by the system and its control group."""
    limits = [_available()]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
