"""verify finds every flipped bit, and names what it is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.output_help import NAMES, build, layout, tree
from weightsmith._base.errors import Corrupt, FormatError, NotFound, Unsupported, WeightsmithError
from weightsmith._outputs.checksum import hash_bytes
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.places import verify
from weightsmith._outputs.save import save_model


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(raw)


def problems(folder: Path) -> tuple[str, ...]:
    with pytest.raises(Corrupt) as caught:
        verify(folder)
    return caught.value.finding.details


def test_a_good_checkpoint_is_reported_with_its_counts(tmp_path: Path) -> None:
    out = build(tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    report = verify(out)
    assert (report.tensors, report.files, report.plan, report.extra) == (len(NAMES), 2, "plan", ("notes.txt",))
    assert report.nbytes == sum(len(v) for k, v in tree(out).items() if k not in (MANIFEST_NAME, "notes.txt"))


@pytest.mark.parametrize("name", [n for n, place in layout().places.items() if place.nbytes])
def test_a_flipped_bit_names_its_tensor_and_no_other(tmp_path: Path, name: str) -> None:
    out = build(tmp_path / "out")
    place = layout().places[name]
    shard = layout().shards[place.shard].name
    for bit in (place.offset * 8, (place.offset + place.nbytes) * 8 - 1):
        flip(out / shard, bit)
        assert problems(out) == (f"tensor {name}: differs from what was written ({shard})",)
        flip(out / shard, bit)
    verify(out)


def test_a_weight_file_without_numbers_is_good(tmp_path: Path) -> None:
    save_model({"a": np.zeros((0, 4), np.float32)}, tmp_path / "out", metadata={}, fsync=False)
    assert verify(tmp_path / "out").tensors == 1


@pytest.mark.long
def test_every_flipped_bit_of_a_weight_file_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_model({"a": np.arange(3, dtype=np.int16)}, out, metadata={}, fsync=False)
    path = out / "model.safetensors"
    raw = path.read_bytes()
    json_end = raw.rindex(b"}") + 1
    padding = range(json_end, 4096, 397)  # some of it: it is all spaces
    for byte in [*range(json_end), *padding, *range(4096, len(raw))]:
        for bit in range(8):
            flip(path, byte * 8 + bit)
            with pytest.raises(Corrupt, match="1 problem found"):
                verify(out, threads=1)
            path.write_bytes(raw)
    verify(out)


@pytest.mark.long
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", MANIFEST_NAME])
def test_every_flipped_bit_of_another_file_is_found_and_named(tmp_path: Path, name: str) -> None:
    out = build(tmp_path / "out")
    step = 1 if name == "config.json" else 23
    for bit in range(0, len((out / name).read_bytes()) * 8, step):
        flip(out / name, bit)
        with pytest.raises(Corrupt, match=name.replace(".", r"\.")):
            verify(out, threads=1)
        flip(out / name, bit)
    verify(out)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    out = build(tmp_path / "out")
    first, second = (shard.name for shard in layout().shards)
    (out / second).unlink()
    flip(out / first, 100)
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(b"stale")
    text = "\n".join(problems(out))
    for word in (
        f"{second}: is missing",
        f"tensor head: lost with {second}",
        f"{first}: its header differs",
        "config.json: has 2 bytes, not the 22",
        "model.safetensors: is not of this checkpoint",
    ):
        assert word in text


def test_a_file_cut_short_names_the_tensors_that_went_with_it(tmp_path: Path) -> None:
    out = build(tmp_path / "out")
    shard = layout().shards[0]
    raw = (out / shard.name).read_bytes()
    (out / shard.name).write_bytes(raw[:-1])
    last = shard.tensors[-1] if shard.tensors[-1].nbytes else shard.tensors[-2]
    assert problems(out) == (
        f"{shard.name}: has {len(raw) - 1:,} bytes, not the {len(raw):,} that were written",
        f"tensor {last.name}: differs from what was written ({shard.name})",
    )


def test_a_file_grown_at_its_end_is_found(tmp_path: Path) -> None:
    out = build(tmp_path / "out")
    with (out / layout().shards[0].name).open("ab") as file:
        file.write(b"x")
    assert len(problems(out)) == 1


def test_a_folder_or_a_manifest_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(NotFound, match="no manifest"):
        verify(tmp_path)


def forge(out: Path, old: bytes, new: bytes) -> None:
    """Change the manifest and give it the right checksum: what an attacker can do."""
    raw = (out / MANIFEST_NAME).read_bytes().split(b"\n", 2)[2]
    assert raw.count(old) >= 1
    raw = raw.replace(old, new)
    (out / MANIFEST_NAME).write_bytes(b'{\n  "checksum": "' + hash_bytes(raw).encode() + b'",\n' + raw)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b'"config.json"', b'"../../etc/passwd"', FormatError),
        (b'"config.json"', b'"/etc/passwd"', FormatError),
        (b'"offset": 4096', b'"offset": 4096000000000', FormatError),
        (b'"offset": 4096', b'"offset": -4096', FormatError),
        (b'"grain_bytes": ', b'"grain_bytes": -', FormatError),
        (b'"header_bytes": 4096', b'"header_bytes": 999999999999', FormatError),
        (b'"bytes": ', b'"bites": ', FormatError),
        (b'"offset": 4096', b'"offset": "4096"', FormatError),
        (b'"weightsmith_manifest": 1', b'"weightsmith_manifest": 2', Unsupported),
        (b'"weightsmith_manifest": 1', b'"weightsmith_manifest"; 1', FormatError),
    ],
)
def test_a_forged_manifest_is_an_error_and_leads_nowhere(
    tmp_path: Path, old: bytes, new: bytes, error: type[WeightsmithError]
) -> None:
    out = build(tmp_path / "out")
    forge(out, old, new)
    with pytest.raises(error):
        verify(out)


def test_a_device_in_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    out = build(tmp_path / "out")
    (out / "config.json").unlink()
    (out / "config.json").symlink_to("/dev/zero")
    shard = layout().shards[0].name
    (out / shard).unlink()
    (out / shard).symlink_to("/dev/zero")
    assert "config.json: is not a file" in problems(out)


@pytest.mark.parametrize(
    "name",
    ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json", "pytorch_model.bin",
     "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "model.safetensors", "other.safetensors",
     "sub/x.safetensors", "Model.SAFETENSORS",
     "x.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json", "model.gguf", "consolidated.00.pth",
     "tf_model.h5", "flax_model.msgpack", "tokenizer.json", "chat_template.jinja", "generation_config.json"],
)  # fmt: skip
def test_an_added_file_that_a_loader_would_read_fails(tmp_path: Path, name: str) -> None:
    out = build(tmp_path / "out")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    assert problems(out) == (f"{name}: is not of this checkpoint, and may be loaded with it",)


@pytest.mark.parametrize(
    "name", ["notes.txt", "training_args.bin", "optimizer.pt", "eval.json", "modeling_x.py", "logo.png", "sub/tokenizer.json"]
)
def test_an_added_file_that_no_loader_reads_is_listed(tmp_path: Path, name: str) -> None:
    out = build(tmp_path / "out")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    assert verify(out).extra == (name,)


def test_a_pipe_in_the_place_of_the_manifest_is_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(FormatError, match="pipe"):
        verify(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(FormatError, match="folder"):
        verify(tmp_path)


@pytest.mark.slow
def test_a_manifest_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_NAME).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="1,099,511,627,776 bytes"):
        verify(tmp_path)


ODD = ("x", -1, 1.5, 1e300, True, None, [], {}, [1], 10**30, "\0", "1")


@pytest.mark.parametrize("path", [
    ("weightsmith_manifest",), ("plan",), ("weights",), ("files",), ("tensors",),
    ("weights", "*"), ("files", "*"), ("tensors", "*"),
    ("weights", "*", "bytes"), ("weights", "*", "header_bytes"), ("weights", "*", "header_xxh3_128"),
    ("files", "*", "bytes"), ("files", "*", "xxh3_128"),
    ("tensors", "*", "file"), ("tensors", "*", "offset"), ("tensors", "*", "bytes"), ("tensors", "*", "grain_bytes"),
    ("tensors", "*", "checksum"),
])  # fmt: skip
def test_a_manifest_of_wrong_types_is_one_clear_error(tmp_path: Path, path: tuple[str, ...]) -> None:
    out = build(tmp_path / "out")
    whole = json.loads((out / MANIFEST_NAME).read_text())
    fine: dict[tuple[str, ...], list[Any]] = {("plan",): [v for v in ODD if isinstance(v, str)], ("tensors",): [{}]}
    for value in (v for v in ODD if v not in fine.get(path, [])):
        spoiled = json.loads(json.dumps(whole))
        at = spoiled
        for key in path[:-1]:
            at = at[key] if key != "*" else at[next(iter(at))]
        at[path[-1] if path[-1] != "*" else next(iter(at))] = value
        write_manifest(out, spoiled)
        with pytest.raises(WeightsmithError) as caught:
            verify(out, threads=1)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("table", ["weights", "files"])
@pytest.mark.parametrize("name", ["nul\0", "\ud800", "", ".", "a/../../b", "a" * 5000])
def test_a_manifest_of_odd_names_is_one_clear_error(tmp_path: Path, table: str, name: str) -> None:
    out = build(tmp_path / "out")
    whole = json.loads((out / MANIFEST_NAME).read_text())
    whole[table][name] = whole[table].pop(next(iter(whole[table])))
    write_manifest(out, whole)
    with pytest.raises(WeightsmithError):
        verify(out, threads=1)


def write_manifest(out: Path, fields: dict[str, Any]) -> None:
    """A manifest of these fields, with the right checksum."""
    del fields["checksum"]
    body = json.dumps(fields, indent=2).encode()[2:]
    (out / MANIFEST_NAME).write_bytes(b'{\n  "checksum": "' + hash_bytes(body).encode() + b'",\n' + body)


@pytest.mark.long
def test_threads_and_progress(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_model({"a": np.arange(3_000_000), "b": np.ones(5)}, out)
    seen: list[tuple[int, int]] = []
    verify(out, threads=3, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (24_000_040, 24_000_040)
    flip(out / "model.safetensors", 8 * 20_000_000)
    assert problems(out) == ("tensor a: differs from what was written (model.safetensors)",)
