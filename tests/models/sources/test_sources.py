"""Every kind of source is held to the interface; and another kind takes one file and one entry in a list."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests.mini import write_checkpoint
from tests.plugin_help import installed
from weightsmith._base.errors import CheckpointError, FormatError, Unsupported
from weightsmith._base.files import FileState, Opener, StoredTensor
from weightsmith._base.tensors import DTYPES, DType, TensorSpec
from weightsmith._files.arrays import view_of
from weightsmith._files.hf_folder import FolderWeights
from weightsmith._models.formats.plain import open_safetensors
from weightsmith._models.lora import apply_adapter, open_adapter
from weightsmith._models.sources.adapted import Adapted, AdaptedTensor, Update
from weightsmith._models.sources.composed import StateDict
from weightsmith._models.sources.files import PlainFiles, SourceFile, unite
from weightsmith.abc.stored import StoredFormat, Wrapped
from weightsmith.abc.tensors import FileKind, OpenedFiles, Tensors
from weightsmith.testing import SourceCase, SourceTests

BF16 = np.dtype(ml_dtypes.bfloat16)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def model() -> dict[str, np.ndarray]:
    """Tensors in model order: several dtypes, a scalar, an empty one."""
    return {
        "empty": np.zeros((0, 3), np.float32),
        "layers.2.w": normal(7, 5).astype(BF16),
        "layers.10.w": normal(3, 2, 4).astype(np.float16),
        "long": np.arange(9, dtype=np.int64),
        "scalar": np.array(5.5, np.float64),
        "z": normal(300, 70),
    }


def opened(folder: Path) -> Tensors:
    return open_safetensors(sorted(folder.glob("*.safetensors")), None, "here").source


class TestPlainFiles(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        tensors = model()
        write_checkpoint(tmp_path / "a", tensors, max_shard_bytes=1000)
        write_checkpoint(tmp_path / "b", {**tensors, "z": normal(299, 70)}, max_shard_bytes=1000)
        assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
        return SourceCase(lambda: opened(tmp_path / "a"), tensors, lambda: opened(tmp_path / "b"))


class TestCheckpoint(SourceTests):
    """A checkpoint is a source itself."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        write_checkpoint(tmp_path / "a", model(), max_shard_bytes=1000)
        save_file({"layers.2.w": normal(7, 5)}, tmp_path / "b.safetensors")
        return SourceCase(
            lambda: weightsmith.open_checkpoint(tmp_path / "a"),
            model(),
            lambda: weightsmith.open_checkpoint(tmp_path / "b.safetensors"),
        )


class TestAdapted(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        base = {**model(), "tied": normal(6, 5).astype(BF16), "wide": normal(4, 5).astype(np.float64)}
        factors = {
            "a": normal(2, 5),
            "b": normal(7, 2),
            "b.wide": normal(4, 2),
            "a.t": normal(2, 300),
            "b.t": normal(70, 2),
            "saved": normal(8, 5).astype(BF16),
        }
        write_checkpoint(tmp_path / "base", base, max_shard_bytes=2000)
        write_checkpoint(tmp_path / "adapter", factors)
        origins = {name: AdaptedTensor(name) for name in base} | {
            "head": AdaptedTensor("tied"),
            "layers.2.w": AdaptedTensor("layers.2.w", updates=(Update("a", "b", 0.5, transposed=False),)),
            "tied": AdaptedTensor("tied", replacement="saved"),
            "wide": AdaptedTensor("wide", updates=(Update("a", "b.wide", -2, transposed=False),)),
            "z": AdaptedTensor("z", updates=(Update("a.t", "b.t", 2, transposed=True),)),
        }

        def adapted(changed: Mapping[str, AdaptedTensor]) -> Tensors:
            return Adapted(opened(tmp_path / "base"), opened(tmp_path / "adapter"), changed, "here")

        def low_rank(a: str, b: str) -> np.ndarray:
            return factors[b].astype(np.float64) @ factors[a].astype(np.float64)

        expected = {
            **base,
            "head": base["tied"],
            "layers.2.w": (base["layers.2.w"].astype(np.float64) + 0.5 * low_rank("a", "b")).astype(np.float32),
            "tied": factors["saved"],
            "wide": base["wide"] - 2 * low_rank("a", "b.wide"),
            "z": (base["z"] + 2 * low_rank("a.t", "b.t").T).astype(np.float32),
        }
        order = ["empty", "head", "layers.2.w", "layers.10.w", "long", "scalar", "tied", "wide", "z"]
        doubled = origins | {"wide": AdaptedTensor("wide", updates=(Update("a", "b.wide", 4, transposed=False),))}
        return SourceCase(lambda: adapted(origins), {n: expected[n] for n in order}, lambda: adapted(doubled))

    def test_what_is_written_and_where(self, case: SourceCase) -> None:
        source = case.open()
        kept = {name: source.natural_dtype(name).name for name in ("layers.2.w", "tied", "head", "wide", "z")}
        assert kept == {"layers.2.w": "BF16", "tied": "BF16", "head": "BF16", "wide": "F64", "z": "F32"}
        assert {n for n in source.specs if source.location(n) is None} == {"layers.2.w", "wide", "z"}
        source.close()


class TestStateDict(SourceTests):
    @pytest.fixture
    def case(self) -> SourceCase:
        arrays = {**model(), "turned": normal(6, 9).T, "strided": np.arange(40, dtype=np.int16)[::3]}
        swapped = {**arrays, "swapped": normal(4, 3).astype(">f4")}

        def state_dict(tensors: Mapping[str, np.ndarray]) -> Tensors:
            return StateDict({name: view_of(name, array) for name, array in tensors.items()}, "here")

        expected = {n: np.ascontiguousarray(a).astype(a.dtype.newbyteorder("=")).reshape(a.shape) for n, a in swapped.items()}
        return SourceCase(lambda: state_dict(swapped), expected, lambda: state_dict(arrays))


# What an adapter's effect depends on.


def test_an_adapted_identity_follows_base_adapter_and_scaling(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", {"model.w.weight": normal(4, 4)}, {"model_type": "x"})
    for name, alpha, rank in (("one", 2, 2), ("same", 2, 2), ("alpha", 4, 2), ("rank", 2, 3)):
        factors = {"base_model.model.w.lora_A.weight": normal(rank, 4), "base_model.model.w.lora_B.weight": normal(4, rank)}
        (tmp_path / name).mkdir()
        save_file(factors, tmp_path / name / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
    identities = {}
    for name in ("one", "same", "alpha", "rank"):
        with (
            weightsmith.open_checkpoint(tmp_path / "base") as base,
            apply_adapter(base, open_adapter(str(tmp_path / name)), "x") as applied,
        ):
            identities[name] = applied.identity
            assert applied.identity != base.identity
    assert identities["one"] == identities["same"]
    assert len(set(identities.values())) == 3


def test_what_a_changed_file_has_different() -> None:
    then = FileState(1, 2, 3000, 4, 5)
    assert then.difference(then) == ""
    for changed, words in (
        ({"device": 9}, "another file has its name"),
        ({"inode": 9}, "another file has its name (inode 2 then, 9 now)"),
        ({"nbytes": 9}, "3,000 bytes then, 9 now"),
        ({"mtime_ns": 9}, "modification time 4 ns then, 9 ns now"),
        ({"ctime_ns": 9}, "change time (ctime) 5 ns then, 9 ns now"),
    ):
        assert words in then.difference(dataclasses.replace(then, **changed))


# A file format and an encoding, as others add them.


def open_raw(paths: Sequence[Path], index: Any, where: str, open_file: Opener) -> OpenedFiles:
    """Files `NAME.raw` that hold one vector of float32 each; an index says nothing more."""
    tables, files = [], []
    for path in paths:
        with open_file(path) as file:
            state = file.state
        if state.nbytes % 4:
            raise FormatError("not a whole number of float32", where=str(path))
        tables.append([StoredTensor(TensorSpec(path.stem, DTYPES["F32"], (state.nbytes // 4,)), path, 0)])
        files.append(SourceFile(path, state, ""))
    return OpenedFiles(PlainFiles(unite(tables, paths[0].parent, index), files, where), {"kind": "raw"})


def choose_raw(names: Sequence[str], where: str) -> FolderWeights | None:
    index = "model.raw.index.json" if "model.raw.index.json" in names else None
    files = tuple(sorted(name for name in names if name.endswith(".raw")))
    return FolderWeights(index, () if index else files, files if index else ()) if files else None


RAW = FileKind("raw", (".raw",), ("*.raw.index.json",), choose_raw, open_raw)


class Halved:
    """A source whose numbers are half of what is stored, named without their `.twice`."""

    def __init__(self, stored: Tensors) -> None:
        self._stored = stored
        names = {name: name.removesuffix(".twice") for name in stored.specs}
        self.specs = {new: dataclasses.replace(stored.specs[old], name=new) for old, new in names.items()}
        self.identity, self.state, self.paths = stored.identity + "halved", stored.state + "halved", stored.paths
        self.check_unchanged, self.close = stored.check_unchanged, stored.close

    def natural_dtype(self, name: str) -> DType:
        return DTYPES["BF16"]

    def preferred_rows(self, name: str) -> int:
        return 1

    def location(self, name: str) -> None:
        return None

    def read_into(self, name: str, start_byte: int, out: Any) -> None:
        self._stored.read_into(f"{name}.twice", start_byte, out)
        np.frombuffer(out, np.float32)[:] *= 0.5


HALVED = StoredFormat(
    "halved",
    "halved",
    lambda config, specs: config.get("quantization_config") == {"quant_method": "twice"},
    lambda stored, config, where: Wrapped(Halved(stored), {k: v for k, v in config.items() if k != "quantization_config"}),
    files=(RAW,),
)


@pytest.fixture
def more_kinds(tmp_path: Path) -> Iterator[None]:
    """A package that brings a stored format with files of its own."""
    module = types.ModuleType("halved_format")
    module.FORMAT = HALVED  # type: ignore[attr-defined]
    with installed(tmp_path / "packages", "halved = halved_format:FORMAT", halved_format=module):
        yield


def raw_model(folder: Path, names: Sequence[str] = ("a", "b"), **config: Any) -> Path:
    folder.mkdir()
    for k, name in enumerate(names):
        (folder / f"{name}.raw").write_bytes(np.arange(4, dtype="<f4").tobytes() * (k + 1))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("more_kinds")
def test_a_folder_of_another_kind_is_opened_and_merged(tmp_path: Path) -> None:
    folder = raw_model(tmp_path / "m", model_type="x")
    with weightsmith.open_checkpoint(folder) as checkpoint:
        assert (checkpoint.weights, checkpoint.metadata) == (("a.raw", "b.raw"), {"kind": "raw"})
        assert checkpoint.read("b").tolist() == [0, 1, 2, 3] * 2
    with weightsmith.open_checkpoint(folder / "b.raw") as checkpoint:
        assert (list(checkpoint.specs), checkpoint.config) == (["b"], None)
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": str(folder)}]}, tmp_path / "out", fsync=False)
    with weightsmith.open_checkpoint(tmp_path / "out") as out:
        assert out.read("a").tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("more_kinds")
def test_safetensors_win_and_broken_ones_do_not_give_way(tmp_path: Path) -> None:
    folder = raw_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="too short for a safetensors file"):
        weightsmith.open_checkpoint(folder)
    save_file({"s": normal(3)}, folder / "model.safetensors")
    assert list(weightsmith.open_checkpoint(folder).specs) == ["s"]


@pytest.mark.usefixtures("more_kinds")
def test_the_index_of_another_kind_is_read(tmp_path: Path) -> None:
    folder = raw_model(tmp_path / "m", ("a", "b", "old"))
    index = folder / "model.raw.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "b.raw", "a": "a.raw"}}))
    with weightsmith.open_checkpoint(folder) as checkpoint:
        assert (list(checkpoint.specs), checkpoint.ignored) == (["a", "b"], ("old.raw",))
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(FormatError, match=r"not a \.raw file"):
        weightsmith.open_checkpoint(folder)


@pytest.mark.usefixtures("more_kinds")
def test_an_encoding_is_decoded_unless_raw_is_asked_for(tmp_path: Path) -> None:
    twice = {"quant_method": "twice"}
    folder = raw_model(tmp_path / "m", ("a.twice",), model_type="x", quantization_config=twice)
    with weightsmith.open_checkpoint(folder) as checkpoint:
        assert (checkpoint.config, checkpoint.quantised) == ({"model_type": "x"}, None)
        assert checkpoint.read("a").tolist() == [0, 0.5, 1, 1.5]
    with weightsmith.open_checkpoint(folder, raw=True) as checkpoint:
        assert checkpoint.config == {"model_type": "x", "quantization_config": twice}
        assert checkpoint.quantised == "'twice' (quantization_config in config.json)"
        assert checkpoint.read("a.twice").tolist() == [0, 1, 2, 3]
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": str(folder)}]}, tmp_path / "out", fsync=False)
    with weightsmith.open_checkpoint(tmp_path / "out") as out:
        assert out.specs["a"].dtype.name == "BF16"
        assert out.read("a").astype(float).tolist() == [0, 0.5, 1, 1.5]
        assert "quantization_config" not in (out.config or {})


def test_without_such_a_kind_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights: there is no \.safetensors, .*\.ckpt or \.gguf file"):
        weightsmith.open_checkpoint(raw_model(tmp_path / "m"))
    with pytest.raises(Unsupported, match=r"does not end with \.safetensors, .*\.ckpt or \.gguf"):
        weightsmith.open_checkpoint(tmp_path / "m" / "a.raw")
