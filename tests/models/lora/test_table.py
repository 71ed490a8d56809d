"""The tables of docs/lora.md say of each kind of adapter what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weightsmith._models.lora.config import CONVERTED_KINDS, MERGED_KINDS, UNMERGED_KINDS
from weightsmith._models.lora.kinds import IN_FILES, KINDS, NAMES, kind_of_type

PAGE = (Path(__file__).parents[3] / "docs/lora.md").read_text(encoding="utf-8")


def table(heading: str) -> dict[str, list[str]]:
    """First cell → the others, of the table that begins with a cell."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_has_its_row(name: str) -> None:
    kind = KINDS.get(name)
    read_from, _, merged, written, program = table("kind")[kind.title]
    assert ("PEFT" in read_from, "single files" in read_from) == (bool(kind.types), name in IN_FILES)
    assert (merged != "no", written) == ((True, "as LoRA") if kind.exact else (False, "no"))
    assert ("with the base" in merged) == bool(kind.exact and kind.exact.shape is None)
    assert ("LyCORIS" in program, "PEFT" in program) == (name in IN_FILES, bool(kind.types))


def test_no_row_is_of_another_kind() -> None:
    titles = {KINDS.get(name).title for name in NAMES}
    assert table("kind").keys() - titles == {"LoRA, rsLoRA", "DoRA", "Bone"}
    assert kind_of_type("BONE") == kind_of_type("MISS") == "miss"


def test_every_type_that_is_refused_is_named() -> None:
    rows = {frozenset(re.findall(r"`(\w+)`", types)): advice for types, (advice,) in table("`peft_type`").items()}
    lists = (
        (UNMERGED_KINDS, "use it with PEFT"),
        (CONVERTED_KINDS, "peft.convert_to_lora"),
        (MERGED_KINDS, "merge_and_unload"),
    )
    assert len(rows) == len(lists)
    for kinds, advice in lists:
        unread = frozenset(kind for kind in kinds if not kind_of_type(kind))
        assert advice in rows[unread]
