"""Adapters in a shared folder, and their copies."""

from pathlib import Path

import pytest

from cascade.engine import adapter_folder
from cascade.engine.adapter_folder import CONFIG, AdapterFolder
from cascade.errors import InvalidRequest


def test_an_adapter_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards passes, which load from copies, against a shared folder that is slow or gone; and the disk against old copies.

    Guards what is outside the folder, and tells who asks for an adapter that is not there.
    """
    monkeypatch.setattr(adapter_folder, "MAX_COPIES", 2)
    folder = AdapterFolder(str(tmp_path))
    for name in ("red", "blue", "green"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text(name)
    red, blue = Path(folder.place("red")), Path(folder.place("blue"))
    (tmp_path / "red" / CONFIG).unlink()
    assert folder.place("red") == str(red)
    assert (red / CONFIG).read_text() == "red"
    folder.place("green")
    assert (red.exists(), blue.exists()) == (True, False)
    assert Path(folder.place("blue"), CONFIG).read_text() == "blue"
    for name in ("red", "", "..", "blue/..", "yellow"):
        with pytest.raises(InvalidRequest, match="has none of this name"):
            folder.place(name)
