"""Large pages of memory: a pass on a CPU reads every weight, and waits less for addresses where pages are large.

Linux makes them on its own for few programs. Replicas ask the C library for them before they start (`GLIBC_TUNABLES`); for a
program that only imports the library, ``madvise(MADV_COLLAPSE)`` (Linux 6.1) makes them of pages that are in use already.
"""

import ctypes
import sys
from functools import lru_cache
from pathlib import Path

MADV_COLLAPSE = 25
SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def collapse(address: int, nbytes: int) -> int:
    """Put memory of this process into large pages, with what else lies in these; how many there are now.

    None where the system has none, or has none to spare: that is no error. What is written there stays.
    """
    size = _page_size()
    if not size:
        return 0
    pages = range(address // size, -(-(address + nbytes) // size))
    return sum(_libc().madvise(page * size, size, MADV_COLLAPSE) == 0 for page in pages)


@lru_cache
def _page_size() -> int:
    """Bytes of a large page, 0 if there are none."""
    try:
        return int(SIZE.read_text()) if sys.platform == "linux" else 0
    except (OSError, ValueError):
        return 0


@lru_cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc
