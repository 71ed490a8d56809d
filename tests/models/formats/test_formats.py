"""Every stored format that is written is read back; others come with installed packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import weightsmith
from tests.cli_help import CONFIG
from tests.mini import write_checkpoint
from tests.plugin_help import installed
from weightsmith._base.errors import UnknownName
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._execution.identity import work_identity
from weightsmith._models.formats import (
    FORMATS,
    NAMES,
    OF_FILES,
    Encoding,
    StoredFormat,
    broken,
    encodings,
    find_encoding,
    formats,
    installed_code,
    opening,
)
from weightsmith.abc.stored import WHOLE
from weightsmith.testing import EncodingTests, StoredFormatTests

WRITTEN = {stored_format.name: stored_format for stored_format in formats() if stored_format.writes}
EXL2 = ("exl2 4/g128", "exl2 8@0.05/g32+4@0.95/g64", "exl2 5@0.3/g32+4@0.7/g32 unsorted")
"""EXL2's encodings have settings, so that there is no list of them."""


def test_formats_are_told_by_files_of_their_own_or_by_tensors() -> None:
    """Only those that are asked for one of both are imported."""
    assert tuple(name for name in NAMES if FORMATS.get(name).files) == OF_FILES
    recognises_nothing = StoredFormat("none", "none").recognises.__code__
    by_tensors = [name for name in NAMES if FORMATS.get(name).recognises.__code__ != recognises_nothing]
    assert by_tensors == [name for name in NAMES if name not in OF_FILES]
    assert not any(FORMATS.get(name).marks for name in OF_FILES)


@pytest.mark.parametrize("name", WRITTEN)
class TestWrittenFormats(StoredFormatTests):
    @pytest.fixture
    def stored_format(self, name: str) -> StoredFormat:
        return WRITTEN[name]


class TestExl2(StoredFormatTests):
    @pytest.fixture
    def stored_format(self) -> StoredFormat:
        (exl2,) = (stored_format for stored_format in formats() if stored_format.name == "exl2")
        return replace(exl2, unlisted=tuple(map(find_encoding, EXL2)))


@pytest.mark.parametrize("name", EXL2)
class TestExl2Encodings(EncodingTests):
    @pytest.fixture
    def encoding(self, name: str) -> Encoding:
        return find_encoding(name)


SETTINGS = (*EXL2, "exl3 2.5", "plain F16", "gguf-q4_k/64", "gguf-nvfp4/64-scaled", "gguf-f16*2@2", "gguf-8:f16[0-6]t,f32[6-8]")


@pytest.mark.parametrize("name", [*encodings(), *SETTINGS])
def test_a_name_is_the_rendering_of_one_value(name: str) -> None:
    encoding = find_encoding(name)
    assert encoding.name == name
    assert find_encoding(encoding.name) == encoding
    assert encoding.bits > 0 or encoding.name == "plain"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8-block", ("float", 8, 128, True, "BF16", 128, "no", "no")),
        ("w4a16-g32", ("integer", 4, 32, True, "BF16", 1, "sorted", "no")),
        ("gptq-8bit", ("integer", 8, 128, True, "F16", WHOLE, "sorted", "default")),
        ("awq-4bit-g64", ("integer", 4, 64, False, "F16", WHOLE, "sorted", "default")),
        ("mlx-4bit", ("integer", 4, 64, False, "None", 1, "no", "no")),
        ("exl2 5@0.25/g128+4@0.75/g64 unsorted", ("integer", 4.25, 64, True, "F16", WHOLE, "in order", "always")),
        ("exl3 2.5", ("trellis", 2.5, None, True, "F16", WHOLE, "whole", "always")),
        ("gguf-q4_k/64", ("blocks", 4.5, 256, True, "None", 64, "no", "no")),
        ("plain F16", ("plain", 16, None, True, "None", 1, "no", "no")),
    ],
)
def test_a_value_says_what_is_stored_and_what_it_needs(name: str, value: tuple[object, ...]) -> None:
    encoding = find_encoding(name)
    asked = (
        encoding.kind,
        encoding.bits,
        encoding.group,
        encoding.symmetric,
        str(encoding.scale),
        encoding.align_rows,
        encoding.hessian,
        encoding.float16,
    )
    assert asked == value


def test_what_an_encoding_needs_besides_rows() -> None:
    values = encodings().values()
    assert {encoding.name for encoding in values if encoding.maxima} == {
        "fp8-static",
        "nvfp4a16",
        "nvfp4",
        "comfyui-fp8",
        "comfyui-fp8-old",
        "comfyui-nvfp4",
    }
    assert {encoding.name for encoding in values if encoding.inputs is not None} == {"fp8-static", "nvfp4"}
    weighed = {name: find_encoding(name).importances for name in ("gguf-iq1_s", "gguf-q4_k", "gguf-f16", "int8")}
    assert weighed == {"gguf-iq1_s": "must", "gguf-q4_k": "may", "gguf-f16": "no", "int8": "no"}


def test_each_file_or_folder_with_a_format_is_listed() -> None:
    import weightsmith._models.formats as package

    folder = Path(package.__file__).parent
    modules = {path.stem: path for path in folder.glob("*.py")} | {
        path.parent.name: path for path in folder.glob("*/__init__.py")
    }
    with_format = {name for name, path in modules.items() if "\nFORMAT = " in path.read_text()}
    assert with_format == set(NAMES) == {stored_format.name for stored_format in formats()}


# ---- formats of installed packages

POINTS = "lost = brought_format:x\nnothing = brought_format:nothing\ntaken = brought_format:taken"
BROUGHT = """
from dataclasses import replace
from weightsmith._models.formats.mlx import FORMAT
from weightsmith.abc.stored import StoredFormat

nothing = 3
taken = replace(FORMAT, name="mine")
mine = StoredFormat("mine", "MINE")
"""


def test_formats_that_cannot_be_used_are_named_where_one_is_missing(tmp_path: Path) -> None:
    problems = (
        "brought 1.0: the stored format lost cannot be loaded: AttributeError",
        "brought 1.0: the stored format nothing is a int, not a StoredFormat",
        "brought 1.0: the stored format taken has an encoding of another format: mlx-8bit",
    )
    entry = {"quant_method": "mine"}
    folder = write_checkpoint(
        tmp_path / "m", {"a.weight": np.ones((2, 2), np.float32)}, {**CONFIG, "quantization_config": entry}
    )
    with installed(tmp_path / "site", POINTS, brought_format=BROUGHT):
        assert [stored_format.name for stored_format in formats()] == list(NAMES)
        for problem, error in zip(problems, broken(), strict=True):
            assert problem in str(error)
        with pytest.raises(UnknownName, match="unknown encoding 'mine'") as caught:
            find_encoding("mine")
        assert all(problem in str(caught.value) for problem in problems)
        with weightsmith.open_checkpoint(folder) as checkpoint:
            assert all(problem in "\n".join(map(str, checkpoint.notes)) for problem in problems)
    with weightsmith.open_checkpoint(folder) as checkpoint:
        assert checkpoint.notes == ()


def test_another_version_of_a_format_is_other_work(tmp_path: Path) -> None:
    plan = weightsmith.plan({"merge_method": "passthrough", "models": [{"model": str(_model(tmp_path / "m"))}]})
    identities = set()
    for number, code in enumerate((BROUGHT, BROUGHT + "# another\n")):
        with installed(tmp_path / str(number), f"{POINTS}\nmine = brought_format:mine", brought_format=code):
            identities.add(work_identity(plan, (), "cpu"))
            assert len(installed_code()) == 1
    assert installed_code() == ()
    assert len({*identities, work_identity(plan, (), "cpu")}) == 3


def _model(folder: Path) -> Path:
    return write_checkpoint(folder, {"a.weight": np.ones((2, 2), np.float32)}, CONFIG)


def test_no_format_stores_tensors_that_are_surely_plain() -> None:
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.weight", "weight.bias")
    specs = {name: TensorSpec(name, DTYPES[dtype], (8, 8)) for name in names for dtype in ("F64", "F32", "F16", "BF16")}
    assert opening.surely_plain({"model_type": "llama"}, specs)
    for stored_format in formats():
        assert not stored_format.recognises({"model_type": "llama"}, specs), stored_format.name
        for suffix in stored_format.marks:
            assert not any(name.endswith(suffix) for name in specs), (stored_format.name, suffix)


@pytest.mark.parametrize("changed", [{"quantization_config": {"quant_method": "gptq"}}, "q.qweight", "I32", "F8_E4M3"])
def test_what_may_be_stored_otherwise_is_not_surely_plain(changed: object) -> None:
    name = changed if changed == "q.qweight" else "q.weight"
    dtype = changed if isinstance(changed, str) and changed in DTYPES else "BF16"
    config = changed if isinstance(changed, dict) else {}
    assert not opening.surely_plain(config, {str(name): TensorSpec(str(name), DTYPES[dtype], (8, 8))})
