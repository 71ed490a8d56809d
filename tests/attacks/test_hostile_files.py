"""Every hostile file is refused, with words that say why."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import CASES, GOOD, Case, build, entry

from weightsmith._base.errors import WeightsmithError
from weightsmith._files import safetensors
from weightsmith._files.safetensors import read_header


def test_the_file_that_the_cases_spoil_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(GOOD)
    assert [t.spec.name for t in read_header(path).tensors] == ["w"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_file_is_refused_with_the_reason(case: Case, tmp_path: Path) -> None:
    path = tmp_path / f"{case.name}.safetensors"
    path.write_bytes(case.file)
    with pytest.raises(WeightsmithError) as caught:
        read_header(path)
    message = str(caught.value)
    assert type(caught.value) is case.error
    assert message.startswith(f"{path}: ")
    assert "\n  -> " in message, "no next step"
    assert len(message) < len(str(path)) + 1000
    for words in case.words:
        assert words in message


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_hostile_name_cannot_repaint_or_flood_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(build(f'{{"\\u001b[2J{"x" * 100_000}":{entry(shape="[-1]")}}}', bytes(4)))
    with pytest.raises(WeightsmithError) as caught:
        read_header(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_length_bound_itself_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert safetensors.MAX_HEADER_BYTES == 100_000_000  # the reference implementation's
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 100)
    path = tmp_path / "a.safetensors"
    path.write_bytes(build("{}".ljust(100)))
    assert read_header(path).tensors == ()
    path.write_bytes(build("{}".ljust(101)))
    with pytest.raises(WeightsmithError, match="header length 101"):
        read_header(path)
