"""save_file and save_model: whatever the strides, sharing and device, what is read back is what was given."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.output_help import layout, open_staging, put, tree
from weightsmith._base.errors import CannotResume, OutputExists, ParameterError, StoreError
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPES
from weightsmith._files import arrays as views
from weightsmith._outputs.area import StagingArea
from weightsmith._outputs.places import verify
from weightsmith._outputs.save import save_file, save_model
from weightsmith._outputs.staging import Staging


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a file, by the safetensors library: dtype name, shape, bytes."""
    return {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in safetensors.deserialize(path.read_bytes())
    }


def expected(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """The same of a tensor in memory, by numpy's and torch's own contiguous copies."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().resolve_neg()
        name = str(tensor.dtype).removeprefix("torch.")
        flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)
        return BY_TORCH_NAME[name].name, tuple(tensor.shape), flat.numpy().tobytes()
    native = tensor.astype(tensor.dtype.newbyteorder("="))
    return BY_TORCH_NAME[native.dtype.name].name, native.shape, native.tobytes()


def check(tensors: dict[str, Any], folder: Path, **options: Any) -> Path:
    """Save, read with the oracle, compare bit for bit."""
    path = folder / "saved.safetensors"
    save_file(tensors, path, fsync=False, **options)
    assert read(path) == {name: expected(tensor) for name, tensor in tensors.items()}
    assert [p.name for p in folder.iterdir()] == [path.name]
    return path


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# what broke other tools


def test_a_transposed_view(tmp_path: Path) -> None:
    weight = random(70, 50)
    check({"torch": weight.T, "numpy": weight.numpy().T}, tmp_path)


def test_nineteen_rows_of_one_embedding_tensor(tmp_path: Path) -> None:
    embedding = random(19, 64).to(torch.bfloat16)
    path = check({f"row.{i:05d}": embedding[i] for i in range(19)}, tmp_path)
    loaded = safetensors.torch.load_file(path)
    assert torch.equal(torch.stack([loaded[f"row.{i:05d}"] for i in range(19)]), embedding)


def test_one_layer_used_twice(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    path = check(model.state_dict(), tmp_path)
    assert set(read(path)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_one_expert_in_eight_places(tmp_path: Path) -> None:
    expert = random(16, 16).to(torch.float16)
    check({f"experts.{i}.w1.weight": expert for i in range(8)}, tmp_path)
    check({f"experts.{i}.w1.weight": expert.numpy() for i in range(8)}, tmp_path)


def test_overlapping_slices_of_one_storage(tmp_path: Path) -> None:
    storage = random(100)
    windows = storage.as_strided((90, 10), (1, 1))
    check({"a": storage[:60], "b": storage[40:], "all": storage, "windows": windows}, tmp_path)
    check({"windows": np.lib.stride_tricks.sliding_window_view(storage.numpy(), 10)}, tmp_path)


def test_non_contiguous_slices(tmp_path: Path) -> None:
    weight = random(40, 30, 20)
    check({"columns": weight[:, 3:7], "steps": weight[::3, :, ::2], "permuted": weight.permute(2, 0, 1)}, tmp_path)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(2.5),
        "number": np.float32(7),
        "empty": torch.empty(0, 5),
        "flat": np.zeros((3, 0), np.int8),
    }
    check(tensors, tmp_path)


def test_tied_embeddings_are_stored_once_and_named_as_the_safetensors_library_does(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_embed = torch.nn.Embedding(10, 4)
            self.b_head = torch.nn.Linear(4, 10, bias=False)
            self.b_head.weight = self.a_embed.weight

    model = Tied()
    saved = save_file(model.state_dict(), tmp_path / "ours.safetensors", tied="alias")
    safetensors.torch.save_model(model, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert saved.aliases == {"b_head.weight": "a_embed.weight"}
    assert read(tmp_path / "ours.safetensors") == read(tmp_path / "theirs.safetensors")
    ours, theirs = (safetensors.safe_open(tmp_path / f"{n}.safetensors", "pt").metadata() for n in ("ours", "theirs"))
    assert ours == theirs == {"format": "pt", "b_head.weight": "a_embed.weight"}
    other = Tied()
    safetensors.torch.load_model(other, tmp_path / "ours.safetensors")
    assert torch.equal(other.b_head.weight, model.b_head.weight)


# tied


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w[1:],  # another start
        lambda w: w[:-1],  # another length
        lambda w: w.T,  # other strides
        lambda w: w.reshape(4, 4, 1),  # another shape
        lambda w: w.view(torch.int32),  # another dtype
        lambda w: w.clone(),  # other memory
    ],
)
def test_only_identical_views_are_aliases(tmp_path: Path, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = random(4, 4)
    assert save_file({"a": weight, "b": other(weight)}, tmp_path / "x.safetensors", tied="alias").aliases == {}


def test_numpy_and_torch_views_of_one_memory_are_aliases_and_empty_tensors_never_are(tmp_path: Path) -> None:
    weight = random(4, 4)
    tensors = {"a": weight, "b": weight.numpy(), "c": torch.nn.Parameter(weight), "e": weight[:0], "f": weight[:0]}
    saved = save_file(tensors, tmp_path / "x.safetensors", tied="alias")
    assert saved.aliases == {"b": "a", "c": "a"}
    assert set(read(tmp_path / "x.safetensors")) == {"a", "e", "f"}


def test_tensors_made_on_the_fly_are_not_taken_for_aliases(tmp_path: Path) -> None:
    class Lazy(dict[str, Any]):
        """Makes each tensor when asked: without care, each has the address of the one before."""

        def items(self) -> Any:
            return ((f"t{i}", np.full(1000, i, np.float32)) for i in range(5))

    saved = save_file(Lazy(), tmp_path / "x.safetensors", tied="alias")
    assert saved.aliases == {}
    stored = read(tmp_path / "x.safetensors")
    assert [stored[f"t{i}"][2][:4] for i in range(5)] == [np.float32(i).tobytes() for i in range(5)]


def test_metadata_that_an_alias_would_overwrite_is_refused(tmp_path: Path) -> None:
    weight = random(2)
    with pytest.raises(StoreError, match="metadata already says 'mine'"):
        save_file({"a": weight, "b": weight}, tmp_path / "x", metadata={"b": "mine"}, tied="alias")


def test_tied_takes_two_words(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="'share' is neither"):
        save_file({}, tmp_path / "x", tied="share")  # type: ignore[arg-type]


# dtypes


@pytest.mark.parametrize("name", BY_TORCH_NAME)
def test_every_dtype_keeps_every_bit(tmp_path: Path, name: str) -> None:
    dtype = BY_TORCH_NAME[name]
    raw = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 60 * dtype.itemsize, dtype=np.uint8)
    array = raw.view(dtype.numpy).reshape(3, 4, 5)  # NaNs with all kinds of payload among them
    tensor = torch.from_numpy(raw.copy()).view(getattr(torch, name)).reshape(3, 4, 5)
    check({"n": array, "nt": array.T, "t": tensor, "tt": tensor.permute(2, 1, 0), "s": tensor[:, ::2]}, tmp_path)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "int64", "uint16"])
def test_big_endian_arrays_are_written_little_endian(tmp_path: Path, name: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(np.dtype(name).newbyteorder(">"))
    check({"a": array, "b": array.T, "c": array[:, ::-2]}, tmp_path)


def test_a_view_that_is_negated_only_when_read(tmp_path: Path) -> None:
    imaginary = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert imaginary.is_neg()
    check({"a": imaginary, "b": imaginary._neg_view()}, tmp_path)


def test_a_view_that_is_conjugated_only_when_read(tmp_path: Path) -> None:
    numbers = torch.tensor([[1 + 2j, 3 - 4j], [-0.0 + 1j, 5 + 0j]]).conj()
    assert numbers.is_conj()
    check({"a": numbers.T, "b": numbers, "c": numbers.conj()}, tmp_path)


def test_parameters_that_require_gradients(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(random(5, 6))
    check({"a": weight, "b": weight * 2, "c": torch.nn.Buffer(random(3))}, tmp_path)


class RemoteBytes(torch.Tensor):
    """A tensor whose elements are not where its address says, like DTensor and FakeTensor."""

    @staticmethod
    def __new__(cls) -> RemoteBytes:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: np.zeros(2, np.complex128), "dtype complex128"),
        (lambda: np.zeros(2, ">c8"), "a complex array in the other byte order"),
        (lambda: np.array([None]), "dtype object"),
        (lambda: np.array(["a"]), "dtype str"),
        (lambda: np.zeros(2, np.longdouble), "dtype float128|dtype longdouble"),
        (lambda: np.zeros(2, "M8[s]"), "dtype datetime64"),
        (lambda: np.zeros(2, [("a", "f4")]), "dtype void"),
        (lambda: np.zeros(2, ml_dtypes.int4), "dtype int4"),
        (lambda: np.zeros(2, ml_dtypes.float8_e4m3b11fnuz), "dtype float8_e4m3b11fnuz"),
        (lambda: np.ma.masked_array([1.0, 2.0], [True, False]), "masked"),
        (lambda: [1.0, 2.0], r"builtins\.list"),
        (lambda: 3.0, r"builtins\.float"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "dtype complex128"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "dtype float4_e2m1fn_x2"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.zeros(2, device="meta"), "meta tensor"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "uninitialised"),
        (RemoteBytes, "RemoteBytes"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path: Path, make: Callable[[], Any], words: str) -> None:
    with pytest.raises(StoreError, match=f"the.culprit: this is .*({words})"):
        save_file({"fine": np.ones(2), "the.culprit": make()}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_names_must_be_text(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must be a string, not 3"):
        save_file({3: np.ones(2)}, tmp_path / "x")  # type: ignore[dict-item]


# any view at all


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of any dtype and strides: sliced, reversed, permuted, broadcast, byte-swapped."""
    dtype = draw(st.sampled_from(sorted(DTYPES)).map(DTYPES.__getitem__))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    high = 2 if dtype.name == "BOOL" else 256
    raw = rng.integers(0, high, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    array = raw.view(dtype.numpy).reshape(shape)
    if dtype.name[0] in "FIU" and not dtype.name.startswith("F8") and draw(st.booleans()):
        array = array.view(array.dtype.newbyteorder())
    array = array[tuple(slice(draw(st.integers(0, 3)), None, draw(st.sampled_from([1, 2, -1, -3]))) for _ in shape)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(0, 4)), *array.shape))
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    return array


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


def check_in_tiny_tiles(tensors: dict[str, Any], folder: Path) -> None:
    """With tiles and scratch so small that tiny tensors take every path that large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "TILE_BYTES", 64)
        patch.setattr(views, "_SCRATCH_BYTES", 24)
        patch.setattr(views, "_SCRATCH_PAD_BYTES", 8)
        check(tensors, folder)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A contiguous tensor with the array's shape, dtype and bits."""
    native = np.array(array, array.dtype.newbyteorder("="))
    tensor = torch.empty(array.shape, dtype=getattr(torch, BY_TORCH_NAME[array.dtype.name].torch))
    if array.size:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(native.reshape(-1).view(np.uint8)))
    return tensor


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(arrays(), max_size=4))
def test_any_numpy_view_is_read_back_bit_for_bit(folder: Path, tensors: list[np.ndarray]) -> None:
    check_in_tiny_tiles({f"t{i}": t for i, t in enumerate(tensors)}, folder)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(arrays(), st.data())
def test_any_torch_view_is_read_back_bit_for_bit(folder: Path, array: np.ndarray, draw: st.DataObject) -> None:
    tensor = to_torch(array)
    tensor = tensor.permute(draw.draw(st.permutations(range(tensor.ndim))))
    if tensor.ndim and draw.draw(st.booleans()):
        tensor = tensor[draw.draw(st.integers(0, 2)) :: 2]
    if draw.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    check_in_tiny_tiles({"t": tensor, "again": tensor}, folder)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(arrays())
def test_tensors_on_a_device_are_copied_in_pieces(folder: Path, array: np.ndarray) -> None:
    tensor = to_torch(array)
    tensor = tensor.permute(list(reversed(range(tensor.ndim))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "TILE_BYTES", 64)
        view = views.view_of("t", tensor)
        remote = views.View(view.spec, None, tensor, view.identity)  # as if it were on a device
        tile = np.empty(64, np.uint8)
        runs = [bytes(piece) for piece in views.pieces(remote, tile)]
    assert b"".join(runs) == expected(tensor)[2]
    assert all(len(run) <= 64 for run in runs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-gpu")
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    weight = random(3000, 2000).cuda()
    check({"a": weight, "b": weight.T, "c": weight[::2, ::3].bfloat16(), "d": weight[0, 0]}, tmp_path)


@pytest.mark.long
def test_large_tensors_take_the_real_tiles(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).integers(0, 2**16, (1500, 2100), dtype=np.uint16)
    cube = matrix.reshape(30, 50, 2100)
    tensors = {
        "plain": matrix,
        "transposed": matrix.T,
        "experts": cube.transpose(0, 2, 1),
        "all": cube.transpose(2, 1, 0),
        "reversed": matrix[::-1, ::-1],
        "rows": np.broadcast_to(matrix[0], (1500, 2100)),
        "columns": np.broadcast_to(matrix[:, :1], (1500, 2100)),
        "one long row": matrix.reshape(1, -1)[:, ::2],
    }
    check(tensors, tmp_path)


# files and folders


def test_a_file_is_replaced_whole_even_when_its_tensors_are_mapped_from_it(tmp_path: Path) -> None:
    path = check({"a": np.arange(10_000.0)}, tmp_path)
    mapped = np.memmap(path, np.float64, "r", offset=4096)
    save_file({"b": mapped[::-1]}, path)
    assert read(path) == {"b": expected(np.arange(10_000.0)[::-1])}


def test_a_tensor_that_fails_half_way_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = check({"a": np.arange(10.0)}, tmp_path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(views, "_copy", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            save_file({"a": np.ones((3, 4)).T}, path)
        with pytest.raises(RuntimeError, match="device lost"):
            save_model({"a": np.ones((3, 4)).T}, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_an_existing_file_is_kept_on_request(tmp_path: Path) -> None:
    path = check({"a": np.ones(2)}, tmp_path)
    with pytest.raises(OutputExists, match="overwrite=True"):
        save_file({"b": np.ones(2)}, path, overwrite=False)
    assert set(read(path)) == {"a"}
    save_file({"b": np.ones(2)}, tmp_path / "new", overwrite=False)
    assert set(read(tmp_path / "new")) == {"b"}


def test_a_file_that_appears_meanwhile_is_kept_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = check({"a": np.ones(2)}, tmp_path)
    monkeypatch.setattr("weightsmith._outputs.save._check_file", lambda *_: None)  # lost the race
    with pytest.raises(OutputExists):
        save_file({"b": np.ones(2)}, path, overwrite=False)
    assert set(read(path)) == {"a"}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputExists, match="folder has this name"):
        save_file({}, tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x", tmp_path / "file" / "folder" / "x"):
        with pytest.raises(StoreError, match="its folder cannot be created: "):
            save_file({}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_missing_folders_are_made_as_a_merge_makes_them(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.safetensors"
    save_file({"w": np.ones(2)}, path)
    assert set(read(path)) == {"w"}


def test_metadata_is_written_as_given(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones(2)}, path)
    assert safetensors.safe_open(path, "np").metadata() == {"format": "pt"}
    save_file({"a": np.ones(2)}, path, metadata={"k": "v"})
    assert safetensors.safe_open(path, "np").metadata() == {"k": "v"}


def test_a_model_is_sharded_verified_and_loaded(tmp_path: Path) -> None:
    weight = random(50, 40)
    tensors = {"a": weight, "b": weight.T, "tied": weight, "n": np.arange(7)}
    saved = save_model(tensors, tmp_path / "m", max_shard_bytes=8000, config={"model_type": "x"}, tied="alias")
    assert saved.files == tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert verify(saved.path).tensors == 3
    index = json.loads((saved.path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 16056, "tied": "a"}
    assert index["weight_map"] == {"a": saved.files[0], "b": saved.files[1], "n": saved.files[2]}
    stored = {k: v for name in saved.files for k, v in read(saved.path / name).items()}
    assert stored == {k: expected(tensors[k]) for k in ("a", "b", "n")}
    assert json.loads((saved.path / "config.json").read_text()) == {"model_type": "x"}


def test_a_single_file_model_names_its_aliases_in_the_file(tmp_path: Path) -> None:
    weight = random(5, 4)
    save_model({"a": weight, "tied": weight}, tmp_path / "m", tied="alias")
    with safetensors.safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "tied": "a"}


def test_a_model_is_overwritten_only_on_request(tmp_path: Path) -> None:
    save_model({"a": np.ones(2)}, tmp_path / "m")
    with pytest.raises(OutputExists):
        save_model({"b": np.ones(2)}, tmp_path / "m")
    save_model({"b": np.ones(2)}, tmp_path / "m", overwrite=True)
    assert list(read(tmp_path / "m" / "model.safetensors")) == ["b"]


def test_save_model_does_not_throw_away_an_interrupted_merge(tmp_path: Path) -> None:
    with open_staging(tmp_path / "m", layout(), "a merge") as staging:
        put(staging)
    before = tree(tmp_path)
    with pytest.raises(CannotResume, match="unfinished work of a merge"):
        save_model({"a": np.ones(2)}, tmp_path / "m")
    assert tree(tmp_path) == before


def test_equal_tensors_make_equal_files_whatever_their_strides(tmp_path: Path) -> None:
    weight = random(30, 20)
    save_model({"a": weight}, tmp_path / "one")
    save_model({"a": weight.T.contiguous().T}, tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_what_fails_after_publishing_is_said_and_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rmdir", failing)
    (warning,) = save_model({"a": np.ones(3)}, tmp_path / "out", fsync=False).warnings
    folder = tmp_path / ".out.weightsmith-staging"
    assert "published and complete, but cleaning up failed: Input/output error" in warning.what
    assert (warning.where, warning.fix) == (str(folder), f"Remove {folder} yourself.")
    verify(tmp_path / "out")


def test_what_fails_while_cleaning_up_does_not_hide_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise StoreError("cannot be removed")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "write", interrupted)
    monkeypatch.setattr(StagingArea, "remove", failing)
    with pytest.raises(KeyboardInterrupt) as caught:
        save_model({"a": np.ones(3)}, tmp_path / "out", fsync=False)
    assert "cannot be removed" in "".join(caught.value.__notes__)


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputExists, match="not a file"):
        save_file({"a": np.ones(3)}, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_the_size_of_weight_files_may_be_text(tmp_path: Path) -> None:
    tensors = {"a": np.zeros(100, np.float32), "b": np.zeros(100, np.float32)}
    assert len(save_model(tensors, tmp_path / "m", max_shard_bytes="0.4kB").files) > len(
        save_model(tensors, tmp_path / "n").files
    )
    with pytest.raises(ParameterError, match="max_shard_bytes: must be a size such as 800MB, 5GB or 2GiB, not 'big'"):
        save_model(tensors, tmp_path / "o", max_shard_bytes="big")
    assert not (tmp_path / "o").exists()
