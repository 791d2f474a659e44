"""Zero the device code of other architectures in CUDA shared objects, in place, so that they compress to little.

    python -m benchmarks.gpu.prune 90 vllm/*.so vllm/vllm_flash_attn/*.so

Offsets stay, so files load as before. A kernel without code for the architecture that is left fails when it is called.
``--ptx`` keeps what a driver compiles, which a few kernels need.
"""

import argparse
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)  # of a fat binary
PTX, ELF = 1, 2  # kinds of its entries


def prune(data: bytearray, keep: int, *, ptx: bool) -> Counter[tuple[int, int]]:
    """Zero what is not for the architecture ``keep``; returns bytes by kind and architecture, as they were."""
    seen: Counter[tuple[int, int]] = Counter()
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if header != 16 or not size or at + header + size > len(data):  # the same four bytes by chance
            at += 4
            continue
        place, end = at + header, at + header + size
        while place < end:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, place)
            architecture = struct.unpack_from("<I", data, place + 28)[0]
            if kind not in (PTX, ELF) or not 32 <= head <= 256 or place + head + payload > end + 64:
                break
            seen[kind, architecture] += payload
            if not ((kind == ELF and architecture == keep) or (kind == PTX and ptx)):
                data[place + head : place + head + payload] = bytes(payload)
            place += head + payload
        at = end
    return seen


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu.prune")
    made.add_argument("architecture", type=int, help="such as 90 for H100 and H200")
    made.add_argument("files", nargs="+", type=Path)
    made.add_argument("--ptx", action="store_true", help="keep what drivers compile")
    chosen = made.parse_args(arguments)
    for path in chosen.files:
        content = bytearray(path.read_bytes())
        if found := prune(content, chosen.architecture, ptx=chosen.ptx):
            path.write_bytes(content)
        print(
            path.name,
            len(content),
            {f"{'PTX' if kind == PTX else 'code'} {arch}": size for (kind, arch), size in found.items()},
        )


if __name__ == "__main__":
    main()
