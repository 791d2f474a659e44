"""Zero the device code of other architectures in CUDA shared objects, in place, so that they compress to little.

Offsets stay, so files load as before. A kernel without code for the architecture that is left fails when it is called. So do
the few that a driver would compile.
"""

import struct
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)  # a fat binary begins with it
PTX, ELF = 1, 2  # kinds of its entries


def prune(path: Path, architecture: int) -> None:
    """Zero what the file at ``path`` has for other architectures than this one, such as 90 for H100 and H200."""
    data = bytearray(path.read_bytes())
    at, pruned = 0, False
    while (at := data.find(MAGIC, at)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if header != 16 or not size or at + header + size > len(data):  # the same four bytes by chance
            at += 4
            continue
        place, end = at + header, at + header + size
        while place < end:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, place)
            if kind not in (PTX, ELF) or not 32 <= head <= 256 or place + head + payload > end + 64:
                break
            if kind == PTX or struct.unpack_from("<I", data, place + 28)[0] != architecture:
                data[place + head : place + head + payload] = bytes(payload)
                pruned = True
            place += head + payload
        at = end
    if pruned:
        path.write_bytes(data)
