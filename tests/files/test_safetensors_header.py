"""Headers of good files: what read_header says, against the reference writer and literal bytes."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from weightsmith._base.errors import CheckpointError, FormatError, NotFound
from weightsmith._base.tensors import DTYPES
from weightsmith._files.safetensors import Header, read_header

BYTES = np.arange(24, dtype=np.uint8)


def write(path: Path, header: str, data: bytes = b"") -> Path:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def stored_bytes(header: Header) -> dict[str, bytes]:
    contents = {}
    for tensor in header.tensors:
        data = tensor.file.read_bytes()
        contents[tensor.spec.name] = data[tensor.offset : tensor.offset + tensor.spec.nbytes]
    return contents


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_is_read_as_the_reference_writes_it(dtype: str, tmp_path: Path) -> None:
    array = BYTES.view(DTYPES[dtype].numpy) if dtype != "BOOL" else (BYTES % 2).view(np.bool_)
    array = array.reshape(1, -1)
    if dtype in ("BF16", "F8_E4M3", "F8_E5M2"):  # the reference's numpy side does not know them
        import torch
        from safetensors.torch import save_file as save_torch

        raw = torch.from_numpy(BYTES.copy())
        save_torch({"w": raw.view(getattr(torch, DTYPES[dtype].torch)).reshape(1, -1)}, tmp_path / "a.safetensors")
    else:
        save_file({"w": array}, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    (tensor,) = header.tensors
    assert tensor.spec.dtype is DTYPES[dtype]
    assert tensor.spec.shape == array.shape
    assert stored_bytes(header) == {"w": array.tobytes()}


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    arrays = {
        "scalar": np.array(7, np.float32),
        "none": np.zeros((0,), np.float16),
        "no_columns": np.zeros((3, 0), np.int64),
        "w": np.ones((2, 3), np.float32),
    }
    save_file(arrays, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    assert {t.spec.name: t.spec.shape for t in header.tensors} == {n: a.shape for n, a in arrays.items()}
    assert stored_bytes(header) == {n: a.tobytes() for n, a in arrays.items()}


def test_metadata_and_digest(tmp_path: Path) -> None:
    for name, tensor, array in (("a", "w", BYTES), ("b", "w", BYTES + 1), ("c", "v", BYTES)):
        save_file({tensor: array}, tmp_path / f"{name}.safetensors", metadata={"note": "é"})
    a, b, c = (read_header(tmp_path / f"{name}.safetensors") for name in "abc")
    assert a.metadata == {"note": "é"}
    assert a.digest == b.digest != c.digest
    assert (len(a.digest), a.state.nbytes) == (32, a.tensors[0].offset + 24)


@pytest.mark.parametrize("header", ["{}", '{"__metadata__":null}', '{"__metadata__":{}}', "  {}  \n"])
def test_a_file_without_tensors_is_good(header: str, tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "a.safetensors", header)).tensors == ()


def test_order_is_that_of_the_bytes_and_padding_is_allowed(tmp_path: Path) -> None:
    header = """ {"b": {"data_offsets": [3, 5], "shape": [2], "dtype": "U8"},
        "empty": {"dtype": "F32", "shape": [0, 9], "data_offsets": [3, 3]},
        "a": {"shape": [3], "dtype": "I8", "data_offsets": [0, 3]}}""".ljust(4096)
    read = read_header(write(tmp_path / "a.safetensors", header, b"abcde"))
    assert [(t.spec.name, t.offset) for t in read.tensors] == [("a", 4104), ("empty", 4107), ("b", 4107)]
    assert stored_bytes(read) == {"a": b"abc", "b": b"de", "empty": b""}


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "real", "{}")
    (tmp_path / "a.safetensors").symlink_to("real")
    assert read_header(tmp_path / "a.safetensors").state.nbytes == 10


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        read_header(tmp_path / "none.safetensors")
    (tmp_path / "broken").symlink_to("none")
    with pytest.raises(NotFound, match="symbolic link to none, which does not exist"):
        read_header(tmp_path / "broken")
    with pytest.raises(FormatError, match="not a regular file, but a folder"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer for ever
    with pytest.raises(FormatError, match="not a regular file, but a pipe"):
        read_header(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "loop")


def test_the_garbage_collector_is_on_again_after_success_and_failure(tmp_path: Path) -> None:
    read_header(write(tmp_path / "a.safetensors", "{}"))
    assert gc.isenabled()
    with pytest.raises(FormatError):
        read_header(write(tmp_path / "a.safetensors", "{"))
    assert gc.isenabled()
    gc.disable()
    try:
        read_header(write(tmp_path / "a.safetensors", "{}"))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.long
def test_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    n, nbytes = 100_000, 1024 * 6656 * 2
    entries = ",".join(
        f'"model.layers.{i // 1000}.mlp.experts.{i % 1000}.down_proj.weight":'
        f'{{"dtype":"BF16","shape":[1024,6656],"data_offsets":[{i * nbytes},{(i + 1) * nbytes}]}}'
        for i in range(n)
    )
    path = write(tmp_path / "a.safetensors", f"{{{entries}}}")
    start = path.stat().st_size
    os.truncate(path, start + n * nbytes)  # a hole: 1.4 TB that take no space
    began = time.perf_counter()
    header = read_header(path)
    print(f"{n:,} tensors, {header.state.nbytes:,} bytes: {time.perf_counter() - began:.2f} s")
    assert len(header.tensors) == n
    last = header.tensors[-1]
    assert last.spec.name == "model.layers.99.mlp.experts.999.down_proj.weight"
    assert (last.offset, last.spec.dtype.numpy) == (start + (n - 1) * nbytes, np.dtype(ml_dtypes.bfloat16))
