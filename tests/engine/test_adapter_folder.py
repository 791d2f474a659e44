"""Adapters in a shared folder, and their copies."""

from pathlib import Path

import pytest

from cascade.engine import adapter_folder
from cascade.engine.adapter_folder import CONFIG, AdapterFolder
from cascade.errors import InvalidRequest


def add(path: Path, name: str) -> None:
    (path / name).mkdir()
    (path / name / CONFIG).write_text(name)


def test_an_adapter_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards passes, which load from copies, against a shared folder that is slow or gone; and the disk against old copies."""
    monkeypatch.setattr(adapter_folder, "MAX_COPIES", 2)
    folder = AdapterFolder(str(tmp_path))
    for name in ("red", "blue"):
        add(tmp_path, name)
    red, blue = Path(folder.place("red")), Path(folder.place("blue"))
    (tmp_path / "red" / CONFIG).unlink()
    assert folder.place("red") == str(red)
    assert (red / CONFIG).read_text() == "red"
    add(tmp_path, "green")
    folder.place("green")
    assert (red.exists(), blue.exists()) == (True, False)
    assert Path(folder.place("blue"), CONFIG).read_text() == "blue"
    with pytest.raises(InvalidRequest, match="has none of this name"):
        folder.place("red")


@pytest.mark.parametrize("name", ["", "..", "red/..", "yellow"])
def test_what_is_no_adapter_is_refused(tmp_path: Path, name: str) -> None:
    """Guards what is outside the folder, and tells who asks for an adapter that is not there."""
    add(tmp_path, "red")
    with pytest.raises(InvalidRequest, match="has none of this name"):
        AdapterFolder(str(tmp_path)).place(name)
