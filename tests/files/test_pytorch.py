"""PyTorch's zip checkpoints, against torch itself; and files that were made to do harm."""

from __future__ import annotations

import collections
import io
import os
import pickle
import pickletools
import random
import resource
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.work import steps
from weightsmith._base.errors import CheckpointError, FormatError, NotFound, Unsupported
from weightsmith._base.files import FileState
from weightsmith._base.tensors import DTYPES
from weightsmith._files import pytorch, state_pickle, zip_records
from weightsmith._files.pytorch import PickleHeader, StoredView, read_pickle_header, read_view


class Reader:
    """Positioned reads of one file, counted."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.sizes: list[int] = []

    def __call__(self, offset: int, buffer: memoryview) -> None:
        assert 0 <= offset <= offset + len(buffer) <= len(self.data), "reads outside the file"
        self.sizes.append(len(buffer))
        buffer[:] = self.data[offset : offset + len(buffer)]


def logical(path: Path, view: StoredView, start: int = 0, nbytes: int | None = None) -> bytes:
    out = bytearray(view.spec.nbytes - start if nbytes is None else nbytes)
    read_view(Reader(path), view, start, memoryview(out))
    return bytes(out)


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def save(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def check(path: Path, tensors: dict[str, torch.Tensor]) -> PickleHeader:
    """The header has these tensors and no others, in this order; names, dtypes, shapes and bytes."""
    header = read_pickle_header(path)
    assert [view.spec.name for view in header.tensors] == list(tensors)
    for view in header.tensors:
        tensor = tensors[view.spec.name]
        assert (view.spec.dtype.torch, view.spec.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert view.contiguous == tensor.is_contiguous(), view
        assert logical(path, view) == raw(tensor), view
    return header


W = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
VIEWS = {
    "contiguous": W,
    "transposed": W.transpose(0, 2),
    "permuted": W.permute(1, 2, 0),
    "offset": W[1:],
    "narrow": W[:, 1:3],
    "stepped": W[::2, ::3, ::2],
    "last": W[..., -1],
    "scalar": torch.tensor(3.5),
    "scalar_view": W[1, 2, 3],
    "expanded": torch.arange(4.0).reshape(4, 1).expand(4, 7),
    "expanded_first": torch.arange(4.0).expand(5, 4),
    "expanded_scalar": torch.tensor(2.0).expand(3, 2),
    "windows": torch.arange(10.0).unfold(0, 4, 2),
    "odd_ones": W.reshape(3, 1, 20)[:, :, ::2],
    "empty": torch.empty(0),
    "no_columns": torch.empty(3, 0),
    "empty_view": W[:0].transpose(0, 1),
    "parameter": torch.nn.Parameter(W.clone()),
    "requires_grad": torch.zeros(2, 2, requires_grad=True),
    "buffer": torch.arange(7),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_views_of_every_kind_are_read_as_torch_has_them(protocol: int, tmp_path: Path) -> None:
    header = check(save(tmp_path / "a.bin", VIEWS, pickle_protocol=protocol), VIEWS)
    assert (header.ignored, header.notes) == ((), ())
    assert header.state == FileState.of((tmp_path / "a.bin").stat())
    loaded = torch.load(tmp_path / "a.bin", weights_only=False)
    assert {name: raw(tensor) for name, tensor in loaded.items()} == {name: raw(tensor) for name, tensor in VIEWS.items()}


@pytest.mark.parametrize("protocol", [0, 1])
def test_protocols_without_a_number_are_refused(protocol: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the pickle"):
        read_pickle_header(save(tmp_path / "a.bin", {"w": W}, pickle_protocol=protocol))


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_is_read(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, DTYPES[name].torch)
    values = (torch.arange(48) % 2).to(torch.uint8) if name == "BOOL" else torch.arange(48, dtype=torch.uint8)
    tensor = values.view(dtype).reshape(2, -1)
    tensors = {"w": tensor, "t": tensor.T, "p": torch.nn.Parameter(tensor, requires_grad=False)}
    header = check(save(tmp_path / "a.bin", tensors), tensors)
    assert {view.spec.dtype for view in header.tensors} == {DTYPES[name]}


@pytest.mark.parametrize("dtype", ["complex32", "complex128"])
def test_other_dtypes_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", {"odd": torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype))})
    with pytest.raises(Unsupported, match=rf"(?s)tensor 'odd': dtype '{dtype}' is not supported.*bfloat16"):
        read_pickle_header(path)


def test_tied_tensors_have_one_place(tmp_path: Path) -> None:
    tensors = {"embed": W, "head": W, "half": W[1:], "p": torch.nn.Parameter(W)}
    header = check(save(tmp_path / "a.bin", tensors), tensors)
    assert len({view.offset for view in header.tensors}) == 1
    assert [view.first for view in header.tensors] == [0, 0, 20, 0]


def test_attributes_and_metadata_are_left_out(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()
    assert type(state) is collections.OrderedDict
    assert state._metadata
    header = check(save(tmp_path / "a.bin", state), dict(state))
    assert header.tensors[0].spec.name == "0.weight"
    parameter, plain = torch.nn.Parameter(W.clone()), W.clone()
    parameter.tag, plain.tag = "x", "y"
    check(save(tmp_path / "b.bin", {"p": parameter, "w": plain}), {"p": parameter, "w": plain})


@pytest.mark.parametrize("key", ["state_dict", "model", "module", "model_state_dict"])
def test_a_nested_state_dict_is_found_beside_what_a_trainer_keeps(key: str, tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    value = {
        "epoch": 3,
        "optimizer": optimizer.state_dict(),
        key: module.state_dict(),
        "loss": 0.5,
        "best": torch.tensor(1.0),
        "args": {"lr": 1e-3, "betas": (0.9, 0.95), "names": ["a", None], "big": 2**70, "device": torch.device("cpu")},
        "bytes": b"x" * 300,
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "size": torch.Size((2, 3)),
        "rng_state": torch.get_rng_state(),
    }
    for protocol in (2, 4, 5):
        header = check(save(tmp_path / "a.ckpt", value, pickle_protocol=protocol), module.state_dict())
        assert header.ignored == tuple(name for name in value if name != key)
        (note,) = header.notes
        assert f"entry '{key}'" in note.what
        assert "'epoch', 'optimizer'" in note.what


def test_entries_of_a_state_dict_that_are_no_tensors_are_listed(tmp_path: Path) -> None:
    value = {"state_dict": {"w": W, "_extra_state": None, "version": (1, [2]), "optimizer": {"0": {"m": W}}}}
    header = check(save(tmp_path / "a.pt", value), {"w": W})
    assert header.ignored == ("state_dict._extra_state", "state_dict.version", "state_dict.optimizer")
    assert "no tensors are ignored: 'state_dict._extra_state', 'state_dict.version'" in header.notes[-1].what


@pytest.mark.parametrize("inside", [{"w": W}, [W], (1, {"deep": [W]})])
def test_tensors_inside_an_entry_are_not_lost_silently(inside: Any, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"entry 'decoder' of the state dict is a (dict|list|tuple) with tensors inside"):
        read_pickle_header(save(tmp_path / "a.pt", {"embed": W, "decoder": inside}))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"model": {"w": W}, "state_dict": {"w": W}}, ["'model'", "'state_dict'"]),
        ({"a": W, "b": W, "model": {"w": W}}, ["'model'", "the top level (2 tensors)"]),
    ],
)
def test_two_candidates_are_both_named(value: Any, named: list[str], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="several state dicts") as caught:
        read_pickle_header(save(tmp_path / "a.pt", value))
    assert all(name in str(caught.value) for name in named)


def test_the_prefix_of_data_parallel_is_removed_when_all_names_have_it(tmp_path: Path) -> None:
    state = torch.nn.DataParallel(torch.nn.Linear(2, 2)).state_dict()
    assert list(state) == ["module.weight", "module.bias"]
    header = check(save(tmp_path / "a.pt", state), {name.removeprefix("module."): t for name, t in state.items()})
    assert "'module.'" in header.notes[0].what
    mixed = {"module.w": W, "w": W, "scaler": W, "optim": W}  # names are only names
    assert check(save(tmp_path / "b.pt", mixed), mixed).notes == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: W}, "a tensor has the name 1, which is not a string"),
        ({"w": W, (1, 2): W}, "a tensor has the name a tuple"),
        ({}, "no state dict.*it is empty"),
        ({"a": 1, "net": {"w": W}}, "no state dict.*'a', 'net'"),
        ({"model": {"layers": {"w": W}}}, "no state dict"),
        ([W], "it holds a list, not a state dict"),
        (W, "it holds a tensor, not a state dict"),
        ({"w": torch.zeros(2, dtype=torch.complex64).conj()}, "tensor 'w': a conjugated or negated view"),
        ({"w": torch._neg_view(torch.ones(2))}, "tensor 'w': a conjugated or negated view"),
        ({"w": torch.eye(2).to_sparse()}, "_rebuild_sparse_tensor'.*\n  It holds a sparse tensor"),
        ({"w": torch.empty(2, device="meta")}, "_rebuild_meta_tensor_no_storage'.*\n  It holds a tensor on the meta device"),
        (torch.nn.Linear(2, 2), r"'torch.nn.modules.linear.Linear'.*\n  It holds a whole module"),
        ({"w": W.numpy()}, r"'numpy\..*_?reconstruct'.*\n  It holds numpy values"),
        ({"w": W, "path": Path("x")}, r"'pathlib\.\w+'"),
    ],
)
def test_what_is_no_plain_state_dict_is_refused_with_a_way_out(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_pickle_header(save(tmp_path / "a.pt", value))
    assert str(caught.value).startswith(f"{tmp_path / 'a.pt'}: ")
    assert caught.value.finding.fix


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(Unsupported, match=r"_rebuild_qtensor'.*\n  .*quantised"):
        read_pickle_header(save(tmp_path / "a.pt", {"w": tensor}))


def test_older_and_other_formats_are_refused_with_a_way_out(tmp_path: Path) -> None:
    def refused(name: str, kind: type[Exception], message: str, content: bytes | None = None) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(kind, match=message) as caught:
            read_pickle_header(tmp_path / name)
        assert caught.value.finding.fix  # type: ignore[attr-defined]

    save(tmp_path / "old.pt", {"w": W}, _use_new_zipfile_serialization=False)
    refused("old.pt", Unsupported, "PyTorch before 1.6")
    refused("bare.pkl", Unsupported, "a bare pickle", pickle.dumps({"w": 1}))
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "script.pt")
    refused("script.pt", Unsupported, "TorchScript")
    refused("a.distcp", Unsupported, "dcp_to_torch_save", b"")
    refused("tar.pt", Unsupported, "tar", bytes(257) + b"ustar\0" + bytes(300))
    refused("lfs.bin", FormatError, "git lfs pull", b"version https://git-lfs.github.com/spec/v1\n")
    refused("page.bin", FormatError, "web page", b"<!DOCTYPE html>")
    refused("safe.bin", FormatError, "rename it to .safetensors", (2).to_bytes(8, "little") + b"{}")
    refused("empty.bin", FormatError, "not a PyTorch zip file", b"")
    refused("noise.bin", FormatError, "not a PyTorch zip file", b"\xff" * 50)
    with zipfile.ZipFile(tmp_path / "docs.bin", "w") as archive:
        archive.writestr("word/document.xml", b"<x/>")
    refused("docs.bin", FormatError, "not one of PyTorch.*\n.*word/document.xml")
    with pytest.raises(NotFound):
        read_pickle_header(tmp_path / "none.bin")


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="big-endian"):
        read_pickle_header(rewrite(tmp_path, save(tmp_path / "a.pt", {"w": W}), {"byteorder": b"big"}))
    with pytest.raises(FormatError, match="byte order is b'middle'"):
        read_pickle_header(rewrite(tmp_path, tmp_path / "a.pt", {"byteorder": b"middle"}))
    check(rewrite(tmp_path, tmp_path / "a.pt", {"byteorder": None, ".format_version": None}), {"w": W})  # torch 1.6 to 2.0


def test_the_digest_changes_with_pickle_and_storage(tmp_path: Path) -> None:
    digests = set()
    for name, tensor in (("w", W), ("v", W), ("w", W + 1)):
        digests.add(read_pickle_header(save(tmp_path / "a.pt", {name: tensor})).digest)
    assert len(digests) == 3
    os.utime(tmp_path / "a.pt", ns=(1, 1))
    assert read_pickle_header(tmp_path / "a.pt").digest in digests


# Ranges of views


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a small tensor after a few random steps."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64]))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tensor = torch.arange(int(torch.tensor(shape).prod())).to(dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, tensor.dim() - 1))
        match draw(st.sampled_from(["permute", "step", "expand", "unsqueeze", "narrow"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "step":
                tensor = tensor[(slice(None),) * axis + (slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 3))),)]
            case "expand":
                tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], draw(st.integers(1, 3)), *tensor.shape[axis:])
            case "unsqueeze":
                tensor = tensor.unsqueeze(axis)
            case "narrow":
                tensor = tensor.narrow(axis, 0, draw(st.integers(0, tensor.shape[axis])))
    return tensor


@pytest.mark.long
@settings(max_examples=120)
@given(views(), st.data())
def test_any_range_of_any_view_is_that_of_the_contiguous_tensor(
    tmp_path_factory: pytest.TempPathFactory, tensor: torch.Tensor, data: st.DataObject
) -> None:
    path = save(tmp_path_factory.getbasetemp() / "range.pt", {"w": tensor})
    (view,) = read_pickle_header(path).tensors
    expected = raw(tensor)
    bounds = [(pytorch.SPAN_BYTES, pytorch.GAP_BYTES), (16, 8), (1, 0)]
    with pytest.MonkeyPatch.context() as patch:
        for span, gap in bounds:  # small bounds reach the loops that only large tensors would
            patch.setattr(pytorch, "SPAN_BYTES", span)
            patch.setattr(pytorch, "GAP_BYTES", gap)
            start = data.draw(st.integers(0, len(expected)))
            end = data.draw(st.integers(start, len(expected)))
            assert logical(path, view, start, end - start) == expected[start:end]
            assert logical(path, view) == expected


LARGE = {
    "transposed": torch.arange(1 << 22, dtype=torch.int32).to(torch.int16).reshape(2048, 2048).T,
    "tall": torch.arange(1 << 22, dtype=torch.int32).to(torch.int16).reshape(64, 65536).T,  # rows 128 KiB apart
    "columns": torch.arange(1 << 22, dtype=torch.int32).to(torch.int16).reshape(2048, 2048)[:, 5:1000],
    "every_third": torch.arange(1 << 22, dtype=torch.int32).to(torch.int16).reshape(2048, 2048)[::3, ::3],
    "expanded": torch.arange(1 << 11, dtype=torch.int16).expand(2048, 2048),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_tile_of_a_large_view_takes_little_memory_and_few_reads(name: str, tmp_path: Path) -> None:
    tensor = LARGE[name]
    path = save(tmp_path / "a.pt", {"w": tensor})
    (view,) = read_pickle_header(path).tensors
    expected = raw(tensor)
    reader = Reader(path)
    start = 3 * tensor.shape[1] * 2  # whole rows, as the tiles of a merge
    out = bytearray(min(1 << 20, len(expected) - start))
    tracemalloc.start()
    read_view(reader, view, start, memoryview(out))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bytes(out) == expected[start : start + len(out)]
    assert max(reader.sizes) <= 1 << 20
    assert peak < 2.2 * (1 << 20)  # the buffer, and the slice that this test's reader makes
    assert len(reader.sizes) < 4096
    assert sum(reader.sizes) < 1.1 * len(reader.data)
    if name == "tall":
        assert sum(reader.sizes) == len(out)  # gaps that long are not read
    out = bytearray(min(1 << 20, len(expected) - 777))
    read_view(Reader(path), view, 777, memoryview(out))
    assert bytes(out) == expected[777 : 777 + len(out)]


def test_a_contiguous_view_is_one_read(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"w": W[1:]})
    (view,) = read_pickle_header(path).tensors
    reader = Reader(path)
    out = bytearray(9)
    read_view(reader, view, 3, memoryview(out))
    assert reader.sizes == [9]
    assert bytes(out) == raw(W[1:])[3:12]


def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = {"big": torch.empty((1 << 31) + 8, 2, dtype=torch.int8), "after": torch.empty(3, 5, dtype=torch.int16)}
    path = tmp_path / "big.bin"
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fake, path)
    if path.stat().st_blocks * 512 > 100 << 20:
        pytest.skip("this file system has no sparse files")
    header = read_pickle_header(path)
    big, after = header.tensors
    assert after.offset > 1 << 32
    values = torch.arange(15, dtype=torch.int16).reshape(3, 5)
    with path.open("r+b") as file:
        file.seek(big.start + (1 << 32) + 3)
        file.write(b"\x07")
        file.seek(after.start)
        file.write(raw(values))
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert torch.equal(loaded["after"], values)
    assert loaded["big"].flatten()[(1 << 32) + 3] == 7
    out = bytearray(8)
    with path.open("rb") as file:

        def read(offset: int, buffer: memoryview) -> None:
            assert os.preadv(file.fileno(), [buffer], offset) == len(buffer)

        read_view(read, big, 1 << 32, memoryview(out))
    assert bytes(out) == bytes([0, 0, 0, 7, 0, 0, 0, 0])


# Hostile files


def make(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """An archive with this pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a/version", b"3\n")
        archive.writestr("a/data.pkl", pickled)
        for key, data in (storages or {}).items():
            archive.writestr(f"a/data/{key}", data)
    return path


def rewrite(folder: Path, source: Path, changes: dict[str, bytes | None]) -> Path:
    """A copy of an archive with other contents of some records; None leaves one out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(folder / "changed.pt", "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            data = changes.get(name.split("/", 1)[1], old.read(name))
            if data is not None:
                new.writestr(name, data)
    return folder / "changed.pt"


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_in_the_pickle_is_run(protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    shell = f"touch {canary}"
    calls = [
        Call(os.system, shell),
        Call(eval, f"open({str(canary)!r}, 'w')"),
        Call(subprocess.getoutput, shell),
        Call(getattr, "x", "upper"),
    ]
    for call in calls:
        for value in (call, {"w": W, "x": call}, {"state_dict": {"w": W}, "hparams": [call]}):
            path = save(tmp_path / "a.pt", value, pickle_protocol=protocol)
            with pytest.raises(
                Unsupported, match=r"'(posix\.system|builtins\.\w+|(subprocess|commands)\.getoutput)'.*it was not run"
            ):
                read_pickle_header(path)
            assert not canary.exists()
    save(tmp_path / "a.pt", {"x": calls[0]})
    torch.load(tmp_path / "a.pt", weights_only=False)  # the attack works where it is let
    assert canary.exists()


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
    b"%sccollections\nOrderedDict\n)RtR"
)
TAIL = b"K\x00K\x02K\x02\x86K\x02K\x01\x86\x89"  # offset 0, shape (2, 2), strides (2, 1), no gradient


def state(tail: bytes = TAIL, name: bytes = b"X\x01\0\0\0w") -> bytes:
    return b"\x80\x02}(" + name + TENSOR.replace(b"%s", tail) + b"u."


def test_the_pickle_written_by_hand_is_good(tmp_path: Path) -> None:
    path = make(tmp_path / "a.pt", state(), {"0": bytes(range(16))})
    (view,) = read_pickle_header(path).tensors
    assert logical(path, view) == bytes(range(16))
    assert raw(torch.load(path, weights_only=True)["w"]) == bytes(range(16))


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"", "starts with"),
        (b"\x80\x02", "ends early"),
        (b"\x80\x02.", "0 values on its stack"),
        (b"\x80\x01}.", "protocol 1"),
        (b"\x80\x06}.", "protocol 6"),
        (b"\x80\x02}}.", "2 values on its stack"),
        (b"\x80\x02}(.", "1 open marks"),
        (b"\x80\x02}.}", "1 bytes follow"),
        (b"\x80\x02\xff.", "0xff is no instruction"),
        (b"\x80\x02i__main__\nX\n.", "instruction INST"),
        (b"\x80\x02}P1\n.", "instruction PERSID"),
        (b"\x80\x02\x82\x01.", "instruction EXT1"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "instruction NEWOBJ"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "instruction LONG4"),
        (b"\x80\x02}t.", "mark that was not set"),
        (b"\x80\x02}(0.", "empty stack"),
        (b"\x80\x02}(q\x00.", "empty stack"),
        (b"\x80\x02h\x00.", "takes memo 0, and 0 were stored"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "stores memo 4,294,967,295"),
        (b"\x80\x02X\xff\xff\xff\xffa.", "ends early: expected 4294967295 bytes"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b"a.", "ends early"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"}.", "has a frame"),
        (b"\x80\x02X\x01\0\0\0\xff.", "not UTF-8"),
        (b"\x80\x02X\x03\0\0\0\xed\xa0\x80.", "not UTF-8"),
        (b"\x80\x02}(Nu.", "odd number"),
        (b"\x80\x02](NNu.", "not a dict"),
        (b"\x80\x02}Na.", "not a list"),
        (b"\x80\x02}(N\x90.", "not a set"),
        (b"\x80\x02]}b.", "sets attributes of a list"),
        (b"\x80\x02N)R.", "calls None"),
        (b"\x80\x02ctorch\nSize\n]R.", "with a list"),
        (b"\x80\x02ctorch\nSize\n)R.", "torch.Size cannot be called with these 0"),
        (b"\x80\x02ctorch\nfloat32\n)R.", "torch.float32 cannot be called"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.", "cannot be called with these 6"),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n(NNNtR.", "cannot be called with these 3"),
        (b"\x80\x02X\x01\0\0\0aQ.", "not that of a storage"),
        (b"\x80\x02(X\x07\0\0\0storageX\x01\0\0\0aX\x01\0\0\0aX\x01\0\0\0aK\x01tQ.", "not that of a storage"),
        (b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0aN\x88tQ.", "not that of a storage"),
        (b"\x80\x02cos\nsystem\n.", r"'os\.system'"),
        (b"\x80\x02c__builtin__\neval\n.", r"'builtins\.eval'"),
        (b"\x80\x02ctorch\nFloatStorage.__init__.__globals__\n.", "FloatStorage.__init__.__globals__'"),
        (b"\x80\x02ctorch\nFloatStorage\r\n.", "no names"),
        (b"\x80\x02c\n\n.", "no names"),
        (b"\x80\x02ctorch Size\nSize\n.", "no names"),
        (b"\x80\x02ctorch\x1b[2J\nSize\n.", r"no names|\\x1b"),
        (b"\x80\x02c" + "t\u043erch".encode() + b"\nSize\n.", "no names"),  # a Cyrillic o
        (b"\x80\x02c" + b"a" * 10_000 + b"\nSize\n.", "512 bytes"),
        (b"\x80\x02ctorch\nSize", "512 bytes"),
        (b"\x80\x04\x8c\x0btorch\nSize\n\x8c\x04Size\x93.", "no names"),
        (b"\x80\x04N\x8c\x04Size\x93.", "not two strings"),
    ],
)
def test_a_bad_pickle_is_refused(pickled: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises((FormatError, Unsupported), match=message) as caught:
        read_pickle_header(make(tmp_path / "a.pt", pickled))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"K\x01K\x02K\x02\x86K\x02K\x01\x86\x89", "last element is number 4 of a storage of 4"),
        (b"K\x00K\x02K\x02\x86K\x03K\x01\x86\x89", "last element is number 4"),
        (b"K\x00K\x03K\x02\x86K\x02K\x01\x86\x89", "last element is number 5"),
        (b"J\xff\xff\xff\xffK\x02K\x02\x86K\x02K\x01\x86\x89", "holds -1, not an integer"),
        (b"K\x00K\x02K\x02\x86J\xff\xff\xff\xffK\x01\x86\x89", "holds -1, not an integer"),
        (b"K\x00\x88K\x02\x86K\x02K\x01\x86\x89", "holds True, not an integer"),
        (b"K\x00K\x02G\0\0\0\0\0\0\0\0\x86K\x02K\x01\x86\x89", "holds 0.0, not an integer"),
        (b"K\x00K\x02\x85K\x02K\x01\x86\x89", "not tuples of one length"),
        (b"K\x00]]\x89", "not tuples of one length"),
        (b"K\x00\x8a\x08" + b"\xff" * 7 + b"\x7f" + b"K\x02\x86K\x00K\x00\x86\x89", "overflows"),
        (b"K\x00\x8a\x09" + b"\xff" * 8 + b"\x7f" + b"K\x02\x86K\x00K\x00\x86\x89", "not an integer from 0 to"),
        (b"K\x00K\x00\x8a\x08" + b"\xff" * 7 + b"\x7f" + b"\x86K\x00K\x00\x86\x89", "overflows"),
        (b"K\x00(" + b"K\x01" * 65 + b"t(" + b"K\x01" * 65 + b"t\x89", "65 dimensions"),
    ],
)
def test_numbers_that_leave_the_storage_are_refused(tail: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"tensor 'w': .*{message}"):
        read_pickle_header(make(tmp_path / "a.pt", state(tail), {"0": bytes(16)}))


@pytest.mark.parametrize(
    ("storages", "message"),
    [
        ({}, "storage '0' is not in the file"),
        ({"0": bytes(15)}, "has 15 bytes in the file, and 4 elements of F32"),
        ({"0": bytes(20)}, "has 20 bytes in the file"),
    ],
)
def test_a_storage_of_another_size_is_refused(storages: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        read_pickle_header(make(tmp_path / "a.pt", state(), storages))


def test_one_storage_of_two_kinds_is_refused(tmp_path: Path) -> None:
    both = state().replace(b"u.", b"X\x01\0\0\0v" + TENSOR.replace(b"%s", TAIL).replace(b"FloatS", b"IntS") + b"u.")
    with pytest.raises(FormatError, match=r"tensor 'v': its storage '0' is 4 elements of torch\.IntStorage here"):
        read_pickle_header(make(tmp_path / "a.pt", both, {"0": bytes(16)}))


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    twice = state().replace(b"u.", b"X\x01\0\0\0wNu.")
    with pytest.raises(FormatError, match="the name 'w' is in a dict twice"):
        read_pickle_header(make(tmp_path / "a.pt", twice, {"0": bytes(16)}))


def deep(opcode: bytes, n: int) -> bytes:
    return b"\x80\x02N" + opcode * n + b"."


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000NK\x04tQK\x00"
BOMBS = {
    "tuples in tuples": deep(b"\x85", 25_000),
    "lists in lists": b"\x80\x02" + b"]" * 25_000 + b"a" * 24_999 + b".",
    "doubled tuples": b"\x80\x02)" + b"q\x00h\x00\x86" * 25_000 + b".",
    "doubled lists": b"\x80\x02]" + b"q\x000](h\x00h\x00e" * 15_000 + b"." ,
    "a doubled tuple as a name": b"\x80\x02}(N" + b"q\x00h\x00\x86" * 25_000 + REBUILD + b"))\x89NtRu.",
    "a doubled tuple as a shape": b"\x80\x02}(X\x01\0\0\0w" + REBUILD + b"N" + b"q\x00h\x00\x86" * 12_500 + b")\x89NtRu.",
    "a list in itself": b"\x80\x02}(X\x01\0\0\0w" + REBUILD + b"))\x89NtRX\x01\0\0\0x]q\x00h\x00au.",
    "a list that ends in lists": b"\x80\x02}(X\x01\0\0\0w" + REBUILD + b"))\x89NtRX\x01\0\0\0x]"
    + b"q\x000](h\x00h\x00e" * 15_000 + b"u.",
    "marks": b"\x80\x02" + b"(" * 125_000 + b".",
    "equal keys": b"\x80\x02}(" + b"K\x00N" * 25_000 + b"u.",
    "colliding integers": b"\x80\x02}("
    + b"".join(b"\x8a\x0c" + (i * (2**61 - 1)).to_bytes(12, "little") + b"N" for i in range(12_500)) + b"u.",
    "one metadata of all": b"\x80\x02}(X\x01\0\0\0a}(" + b"N\x89" * 12_500 + b"uq\x00"
    + b"".join(b"X\x06\0\0\0%06d" % i + REBUILD + b"))\x89Nh\x00tR" for i in range(3_000)) + b"u.",
}  # fmt: skip
READABLE = ("a list in itself", "a list that ends in lists")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_takes_little_time_and_memory(bomb: str, tmp_path: Path) -> None:
    """What is not linear takes for ever: pytest ends it."""
    path = make(tmp_path / "a.pt", BOMBS[bomb], {"0": bytes(16)})
    tracemalloc.start()
    try:
        if bomb in READABLE:
            assert read_pickle_header(path).ignored == ("x",)
        else:
            with pytest.raises((FormatError, Unsupported)):
                read_pickle_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (16 << 20) + 200 * len(BOMBS[bomb])


def test_bounds_of_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_pickle, "MAX_VALUES", 1000)
    monkeypatch.setattr(state_pickle, "MAX_STACK", 2000)
    for body, message in (
        (b"}0" * 1001, "more than 1,000 values"),
        (b"N\x94" * 1001, "more than 1,000 values"),
        (b"N" * 2001, "more than 2,000 values on its stack"),
        (b"(" * 2001, "more than 2,000 marks"),
    ):
        with pytest.raises((FormatError, Unsupported), match=message):
            read_pickle_header(make(tmp_path / "a.pt", b"\x80\x02" + body + b"."))
    monkeypatch.setattr(state_pickle, "MAX_STEPS", 3000)
    with pytest.raises(Unsupported, match="more than 3,000 instructions"):
        read_pickle_header(make(tmp_path / "a.pt", b"\x80\x02" + b"N0" * 1500 + b"N."))
    monkeypatch.setattr(pytorch, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(Unsupported, match="at most 10 are read"):
        read_pickle_header(make(tmp_path / "a.pt", state()))


# Hostile zips


def entry(name: bytes, data: bytes, **local: Any) -> tuple[bytes, bytes]:
    """Local header with data, directory entry without the offset."""
    flags, method, size = local.get("flags", 0), local.get("method", 0), local.get("size", len(data))
    head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, flags, method, 0, 0, 0, size, size, len(name), 0)
    extra, disk = len(local.get("extra", b"")), local.get("disk", 0)
    central = struct.pack("<4s6H3L5H", b"PK\x01\x02", 20, 20, flags, method, 0, 0, 0, size, size, len(name), extra, 0, disk, 0)
    return head + local.get("local_name", name) + data, central + struct.pack("<L", 0)


def assemble(members: list[tuple[bytes, bytes, dict[str, Any]]], **end: Any) -> bytes:
    body, directory = b"", b""
    for name, data, changes in members:
        head, central = entry(name, data, **changes)
        directory += central + struct.pack("<L", changes.get("at", len(body))) + name + changes.get("extra", b"")
        body += head
    count = end.get("count", len(members))
    start, size = end.get("start", len(body)), end.get("size", len(directory))
    comment = end.get("comment", 0)
    return (
        body
        + directory
        + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, start, comment)
        + end.get("behind", b"")
    )


VERSION: tuple[bytes, bytes, dict[str, Any]] = (b"a/version", b"3\n", {})
GOOD: list[tuple[bytes, bytes, dict[str, Any]]] = [(b"a/data.pkl", state(), {}), (b"a/data/0", bytes(16), {})]


def test_the_zip_written_by_hand_is_good(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(assemble([*GOOD, VERSION, (b"a/", b"", {})]))
    assert len(read_pickle_header(tmp_path / "a.pt").tensors) == 1
    assert torch.load(tmp_path / "a.pt", weights_only=True)["w"].shape == (2, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (assemble([*GOOD, (b"a/data/0", b"", {})]), "the member 'a/data/0' twice"),
        (assemble([*GOOD, (b"a/../x", b"", {})]), "no plain relative path"),
        (assemble([*GOOD, (b"/etc/passwd", b"", {})]), "no plain relative path"),
        (assemble([*GOOD, (b"a\\x", b"", {})]), "no plain relative path"),
        (assemble([*GOOD, (b"a/x\0", b"", {})]), "no plain relative path"),
        (assemble([*GOOD, (b"", b"", {})]), "no plain relative path"),
        (assemble([*GOOD, (b"a/\xff", b"", {})]), "not UTF-8"),
        (assemble([*GOOD, (b"b/x", b"", {})]), "not one of PyTorch"),
        (assemble([*GOOD, (b"a/x", b"", {"flags": 1})]), "encrypted member 'a/x'"),
        (assemble([*GOOD, (b"a/x", b"", {"method": 8})]), "member 'a/x' is compressed"),
        (assemble([*GOOD, (b"a/x", b"", {"at": 0})]), "something else is there"),
        (assemble([*GOOD, (b"a/x", b"", {"local_name": b"a/y"})]), "something else is there"),
        (assemble([*GOOD, (b"a/x", b"", {"at": 2**32 - 2})]), "behind the last possible place"),
        (assemble([*GOOD, (b"a/x", b"", {"at": 2**32 - 1})]), "no valid zip64"),
        (assemble([*GOOD, (b"a/x", b"", {"size": 1000})]), "of 1,000 bytes at byte"),
        (assemble([(b"a/data.pkl", state(), {"size": len(state()) + 20}), GOOD[1]]), "overlapping members"),
        (assemble(GOOD, count=1), "unknown bytes in its directory"),
        (assemble(GOOD, count=3), "2 members in its directory, and says 3"),
        (assemble(GOOD, start=5), "bytes were added or lost"),
        (assemble(GOOD, comment=4), "comment of 4 bytes"),
        (assemble(GOOD, behind=b"x"), "does not end with a directory"),
        (assemble([])[-22:], "first bytes b'PK"),
        (b"PK\x03\x04", "does not end with a directory"),
    ],
)  # fmt: skip
def test_a_hostile_zip_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        read_pickle_header(tmp_path / "a.pt")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", state())
    with pytest.raises(FormatError, match=r"member 'a/data\.pkl' is compressed"):
        read_pickle_header(tmp_path / "a.pt")


class Named(torch.Tensor):
    """A tensor class of our own."""


class Odd:
    """Pickled as a tensor of a class that torch has, made by a function that makes no tensor."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._tensor._rebuild_from_type_v2, (collections.OrderedDict, torch.nn.Parameter, (), None)


def test_a_tensor_with_attributes_is_read_and_others_that_look_like_it_are_not(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    tensor.note = "mine"  # type: ignore[attr-defined]
    check(save(tmp_path / "a.pt", {"w": tensor}), {"w": tensor})
    for odd in (tensor.as_subclass(Named), Odd()):  # type: ignore[arg-type]
        with pytest.raises(CheckpointError):
            read_pickle_header(save(tmp_path / "b.pt", {"w": odd}))


def test_zip64_without_need_is_read_and_contradictions_are_not(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, data, _ in GOOD:
            with archive.open(name.decode(), "w", force_zip64=True) as member:
                member.write(data)
    assert len(read_pickle_header(tmp_path / "a.pt").tensors) == 1
    data = save(tmp_path / "b.pt", {"w": W}).read_bytes()
    for offset in (8, 10, 12, 16):  # counts, size and start in the end proper, which then contradicts the zip64 end
        narrow = bytearray(data)
        narrow[len(data) - 22 + offset] ^= 1
        (tmp_path / "b.pt").write_bytes(narrow)
        with pytest.raises(FormatError, match="two ends that contradict each other"):
            read_pickle_header(tmp_path / "b.pt")
    at = data.rindex(b"PK\x06\x07")
    for offset, flipped in ((4, 1), (8, 1), (16, 3)):  # disk, start of the zip64 end, and number of disks in its locator
        changed = bytearray(data)
        changed[at + offset] ^= flipped
        (tmp_path / "b.pt").write_bytes(changed)
        with pytest.raises(FormatError, match="according to its locator"):
            read_pickle_header(tmp_path / "b.pt")
    at = data.rindex(b"PK\x06\x06")
    for offset in (24, 32, 40, 48, 4, 0):  # counts, size, start, length, magic of the zip64 end
        changed = bytearray(data)
        changed[at + offset] ^= 1
        (tmp_path / "b.pt").write_bytes(changed)
        with pytest.raises(FormatError, match="zip archive"):
            read_pickle_header(tmp_path / "b.pt")


@pytest.mark.parametrize(
    ("extra", "refusal"),
    [(struct.pack("<2HL", 1, 4, 0), ""), (struct.pack("<2HL", 1, 4, 1), "is on disk"), (b"", "no valid zip64")],
)
def test_the_number_of_a_disk_may_be_in_the_wide_fields(tmp_path: Path, extra: bytes, refusal: str) -> None:
    (tmp_path / "a.pt").write_bytes(assemble([*GOOD, (b"a/x", b"", {"disk": 0xFFFF, "extra": extra})]))
    if refusal:
        with pytest.raises(FormatError, match=refusal):
            read_pickle_header(tmp_path / "a.pt")
    else:
        assert len(read_pickle_header(tmp_path / "a.pt").tensors) == 1


def test_a_huge_directory_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_records, "MAX_RECORDS", 1)
    (tmp_path / "a.pt").write_bytes(assemble(GOOD))
    with pytest.raises(FormatError, match="2 members; at most"):
        read_pickle_header(tmp_path / "a.pt")
    monkeypatch.setattr(zip_records, "MAX_RECORDS", 2)
    monkeypatch.setattr(zip_records, "MAX_DIRECTORY_BYTES", 99)
    with pytest.raises(FormatError, match="a directory of 110 bytes"):
        read_pickle_header(tmp_path / "a.pt")


# Any damage


def attempt(path: Path, data: bytes) -> PickleHeader | None:
    """Read the file; one of our errors is good, and so is a header of which all can be read."""
    path.write_bytes(data)
    try:
        header = read_pickle_header(path)
    except CheckpointError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017 - one of two good outcomes
        header = None
    else:
        for view in header.tensors:
            logical(path, view, 0, min(view.spec.nbytes, 4096))
    return header


def small(path: Path, protocol: int) -> bytes:
    value = collections.OrderedDict(
        w=W[:2, :2, 0],
        t=torch.arange(6).reshape(2, 3).T,
        p=torch.nn.Parameter(torch.ones(2)),
        f=torch.ones(2).to(torch.float8_e5m2),
    )
    return save(path, {"state_dict": value, "epoch": 3, "lr": 0.1, "x": [b"a", (1,)]}, pickle_protocol=protocol).read_bytes()


@pytest.mark.long
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    data = small(tmp_path / "a.pt", 2)
    assert attempt(tmp_path / "a.pt", data) is not None
    for n in reversed(range(len(data))):
        os.truncate(tmp_path / "a.pt", n)
        with pytest.raises(FormatError):
            read_pickle_header(tmp_path / "a.pt")


def test_a_pickle_cut_at_any_byte_is_refused() -> None:
    for protocol in (2, 4):
        archive = zipfile.ZipFile(io.BytesIO(buffer := _saved(protocol)))
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        assert buffer
        for n in range(len(pickled)):
            with pytest.raises((FormatError, Unsupported)):
                state_pickle.interpret(pickled[:n])


def _saved(protocol: int) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": W, "e": 3}, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


@pytest.mark.matrix("0", "1")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_mutations_are_errors_or_files_that_can_be_read(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    data = small(tmp_path / "a.pt", 2 + seed % 4)
    pickled = (data.index(b"\x80"), data.index(b"PK\x07\x08"))  # up to its data descriptor
    places = ((0, pickled[0]), pickled, (pickled[1], data.index(b"PK\x01\x02")), (data.index(b"PK\x01\x02"), len(data)))
    interesting = [0, 1, 0x7F, 0x80, 0xFF, *(ord(op.code) for op in pickletools.opcodes)]
    good = 0
    for _ in range(500):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(*rng.choice(places))
            match rng.randrange(4):
                case 0:
                    changed[at % len(changed)] = rng.choice(interesting)
                case 1:
                    changed[at % len(changed)] ^= 1 << rng.randrange(8)
                case 2:
                    del changed[at : at + rng.randrange(1, 9)]
                case 3:
                    source = rng.randrange(len(data))
                    changed[at : at + 4] = data[source : source + rng.randrange(1, 9)]
        good += attempt(tmp_path / "a.pt", bytes(changed)) is not None
    assert 0 < good < 250


@pytest.mark.matrix("0")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mutated_pickles_are_errors_or_can_be_read(seed: int, tmp_path: Path) -> None:
    """The same in an archive that is good, so that it is the pickle that is judged."""
    rng = random.Random(100 + seed)
    archive = zipfile.ZipFile(io.BytesIO(small(tmp_path / "a.pt", 2 + seed)))
    records = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    storages = {name.removeprefix("data/"): data for name, data in records.items() if name.startswith("data/")}
    codes = [ord(op.code) for op in pickletools.opcodes]
    for _ in range(300):
        changed = bytearray(records["data.pkl"])
        for _ in range(rng.choice((1, 2, 4))):
            at = rng.randrange(2, len(changed))
            changed[at : at + rng.randrange(2)] = bytes([rng.choice(codes) if rng.random() < 0.7 else rng.randrange(256)])
        make(tmp_path / "b.pt", bytes(changed), storages)
        attempt(tmp_path / "b.pt", (tmp_path / "b.pt").read_bytes())


@pytest.mark.process
@pytest.mark.slow
def test_the_reader_does_not_import_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"w": W})
    code = (
        "import sys; from pathlib import Path; from weightsmith._files.pytorch import read_pickle_header;"
        f"print(read_pickle_header(Path({str(path)!r})).tensors[0].spec, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "w [3, 4, 5] F32 False False\n"


@pytest.mark.long
def test_many_tensors_are_read_in_linear_time(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    work = []
    for n in (500, 5_000):
        path = save(tmp_path / f"{n}.pt", {f"layers.{i}.weight": tensor.clone() for i in range(n)})
        assert len(read_pickle_header(path).tensors) == n
        work.append(steps(lambda path=path: read_pickle_header(path)))
    assert work[1] < 11 * work[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20  # KiB
