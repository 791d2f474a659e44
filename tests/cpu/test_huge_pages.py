"""Large pages: what was asked for is there, and nothing in them is lost."""

import ctypes
import platform
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import pytest
import torch

from cascade.cpu import huge_pages


def _large_pages(address: int) -> int:
    """Bytes of large pages in the mapping of this process that has ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "AnonHugePages:":
            return int(rest[0]) * 1024
    return 0


@pytest.mark.skipif(
    not huge_pages.SIZE.exists() or tuple(map(int, platform.release().split(".")[:2])) < (6, 1),
    reason="this system makes no large pages of memory that is in use",
)
def test_memory_is_put_into_large_pages() -> None:
    """Guards against asking in vain: the system must count at least as many of them as we say there are."""
    size = int(huge_pages.SIZE.read_text())
    with mmap(-1, 8 * size, flags=MAP_PRIVATE | MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        count = huge_pages.collapse(address, len(memory))
        assert 7 <= count <= 9
        assert _large_pages(address + size) >= 6 * size
        assert memory[:] == b"x" * len(memory)


def test_large_pages_hold_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory that is moved, its neighbours, addresses that are nobody's, and systems without large pages."""
    memory = torch.arange(3 * 2**20)
    before = memory.clone()
    assert 0 <= huge_pages.collapse(memory.data_ptr(), memory.nbytes) <= memory.nbytes // 2**21 + 2
    assert torch.equal(memory, before)
    assert huge_pages.collapse(0, 4096) == 0
    monkeypatch.setattr(huge_pages, "_page_size", lambda: 0)
    assert huge_pages.collapse(memory.data_ptr(), memory.nbytes) == 0
