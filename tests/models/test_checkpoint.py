"""Local checkpoints: which files are the model, what the index may say, reading, and that a changed file is noticed."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from weightsmith._base.errors import CheckpointError, FormatError, NotFound, ParameterError, Unsupported, WeightsmithError
from weightsmith._files.hf_folder import unlisted_shards
from weightsmith._models.checkpoint import Checkpoint, HubModel, ModelFolder, locate, open_checkpoint
from weightsmith._models.formats.opening import MAX_CONFIG_BYTES
from weightsmith._models.sources import files

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A = np.arange(12, dtype=np.float32).reshape(4, 3)
B = np.arange(6, dtype=np.int64)


def sharded(folder: Path, weight_map: Any = None, **others: Any) -> Path:
    """Two shards, a in ONE and b in TWO, and an index that says `weight_map`."""
    folder.mkdir(exist_ok=True)
    save_file({"a": A}, folder / ONE)
    save_file({"b": B}, folder / TWO)
    index = {"metadata": {"total_size": 96}, "weight_map": {"a": ONE, "b": TWO} if weight_map is None else weight_map}
    (folder / INDEX).write_text(json.dumps(index | others))
    return folder


def touch(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def arrays(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    return {name: checkpoint.read(name).tolist() for name in checkpoint.specs}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def refused(error: type[WeightsmithError], *words: str, **kwargs: Any) -> str:
    with pytest.raises(WeightsmithError) as caught:
        open_checkpoint(**kwargs)
    assert type(caught.value) is error, caught.value
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


# Which files are the model.


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "limit": [0.0, Infinity]}')
    with open_checkpoint(str(tmp_path)) as c:
        assert arrays(c) == {"a": A.tolist(), "b": B.tolist()}
        assert (c.ref, c.folder, c.revision) == (str(tmp_path), tmp_path, "")
        assert c.config == {"model_type": "llama", "limit": [0.0, float("inf")]}
        assert (c.weights, c.ignored, c.metadata, c.nbytes) == (("model.safetensors",), (), {"format": "pt"}, 96)
        assert repr(c) == f"<Checkpoint {tmp_path}: 2 tensors, 96 bytes>"


@pytest.mark.parametrize("with_index", [True, False])
def test_a_folder_of_shards(with_index: bool, tmp_path: Path) -> None:
    sharded(tmp_path)
    if not with_index:
        (tmp_path / INDEX).unlink()
    with open_checkpoint(tmp_path) as c:
        assert arrays(c) == {"a": A.tolist(), "b": B.tolist()}
        assert (c.weights, c.config, c.files) == ((ONE, TWO), None, ())


def test_one_file_stands_alone(tmp_path: Path) -> None:
    sharded(tmp_path)
    touch(tmp_path, ["config.json", "tokenizer.json"])
    with open_checkpoint(tmp_path / TWO) as c:
        assert arrays(c) == {"b": B.tolist()}
        assert (c.folder, c.config, c.files, c.ignored) == (tmp_path, None, (), ())


@pytest.mark.parametrize(
    ("chosen", "ignored"),
    [
        (["model.safetensors"], ["consolidated.safetensors", "model.fp16.safetensors"]),
        (["model.safetensors"], ["consolidated-00001-of-00002.safetensors", "adapter_model.safetensors"]),
        (["diffusion_pytorch_model.safetensors"], ["diffusion_pytorch_model.fp16.safetensors"]),
        (["pruned.safetensors"], ["consolidated.safetensors"]),
        (["consolidated.safetensors"], []),
        (["part9.safetensors", "part10.safetensors"], []),
    ],
)
def test_the_same_tensors_in_another_file_are_not_read_twice(chosen: list[str], ignored: list[str], tmp_path: Path) -> None:
    for i, name in enumerate(chosen):
        save_file({f"w{i}": B}, tmp_path / name)
    for name in ignored:
        save_file({"w0": B}, tmp_path / name)
    c = open_checkpoint(tmp_path)
    assert (list(c.weights), sorted(c.ignored)) == (chosen, sorted(ignored))


def test_with_an_index_consolidated_files_are_ignored(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": A, "b": B}, tmp_path / "consolidated.safetensors")
    touch(tmp_path, ["consolidated.safetensors.index.json"])
    c = open_checkpoint(tmp_path)
    assert (c.weights, c.ignored) == ((ONE, TWO), ("consolidated.safetensors",))


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    save_file({"a": A}, sharded(tmp_path / "x") / "model.safetensors")
    refused(FormatError, f"both {INDEX} and model.safetensors are there: two models", ref=tmp_path / "x")
    (tmp_path / "x" / INDEX).unlink()
    refused(FormatError, f"both model.safetensors and {ONE} are there: two models", ref=tmp_path / "x")
    touch(tmp_path, ["y/one.safetensors.index.json", "y/two.safetensors.index.json", "y/one.safetensors"])
    refused(FormatError, "both one.safetensors.index.json and two.safetensors.index.json", ref=tmp_path / "y")


def test_an_index_of_the_one_file_is_fine(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert open_checkpoint(tmp_path).weights == ("model.safetensors",)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model-00001-of-00002.safetensors"], ["1 of 2 shards are missing: model-00002-of-00002.safetensors"]),
        (["w-00000-of-00002.safetensors"], ["1 of 2 shards are missing: w-00001-of-00002.safetensors\n"]),
        (["m-2-of-9.safetensors"], ["8 of 9 shards", "m-1-of-9.safetensors, m-3-of-9", "m-4-of-9.safetensors, …"]),
        (["m-1-of-99999999999.safetensors"], ["999,999,999 of 1,000,000,000 shards".replace(",", "")]),
    ],
)
def test_without_an_index_missing_shards_are_noticed(names: list[str], words: list[str], tmp_path: Path) -> None:
    for name in names:
        save_file({name: A}, tmp_path / name)
    refused(FormatError, *words, ref=tmp_path)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["adapter_model.safetensors", "adapter_config.json"], Unsupported, ["adapter (LoRA), not a model"]),
        (["adapter_model.safetensors"], Unsupported, ["adapter (LoRA)", "base_model_folder_or_hub_id+"]),
        (["adapter_config.json", "lora.safetensors"], Unsupported, ["adapter (LoRA)"]),
        (["model.pkl", "config.json"], Unsupported, ["no weights in a format that is read", "'model.pkl'"]),
        (["adapter_config.json", "adapter_model.bin"], Unsupported, ["adapter (LoRA)", "'adapter_model.bin'"]),
        (["consolidated.00.pth", "consolidated.01.pth"], Unsupported, ["consolidated.00.pth", "slices of each tensor"]),
        (["unet/pytorch_model.bin"], NotFound, ["only in subfolders", "'unet/pytorch_model.bin'"]),
        (["llama-Q4_K_M.gguf", "llama-Q8_0.gguf"], FormatError, ["2 GGUF models in one folder: 'llama-Q4_K_M.gguf', 'llama"]),
        (["flax_model.msgpack"], Unsupported, ["no weights in a format that is read"]),
        (["unet/model.safetensors"], NotFound, ["only in subfolders", "'unet/model.safetensors'"]),
        (
            ["config.json", "training_args.bin"],
            NotFound,
            ["no .safetensors, .bin, .pt, .pth, .ckpt or .gguf file", "it holds 'config.json'"],
        ),
        (["._model.safetensors"], NotFound, ["no .safetensors, .bin, .pt, .pth, .ckpt or .gguf file", "it is empty"]),
        ([], NotFound, ["it is empty"]),
    ],
)
def test_a_folder_without_safetensors_says_what_it_is(
    names: list[str], error: type[WeightsmithError], words: list[str], tmp_path: Path
) -> None:
    touch(tmp_path, names)
    message = refused(error, *words, ref=tmp_path)
    assert message.startswith(f"{tmp_path}: ")


def test_the_files_that_go_along(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    carried = [
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
        "x.tiktoken",
    ]
    ignored = ["README.md", ".gitattributes", "model.onnx", "tf_model.h5", "x.msgpack", "x.npz", "x.gguf", "x.bin", "x.pt"]
    ignored += ["pytorch_model.bin.index.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json"]
    ignored += ["training_args.bin", "original/params.json", "onnx/model.onnx", "logo.png"]
    said = ["credentials.json", "id_rsa", "modeling_x.py", "notes.bak", "tokenizer.json.incomplete", "x.exe"]
    touch(tmp_path, [*carried, *ignored, *said])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.files == tuple(carried)
    assert checkpoint.left_out == tuple(said)


@pytest.mark.parametrize(
    "name",
    ["generation_config.json", "tokenizer.model.v3", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
     "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "tekken.json", "qwen.tiktoken", "tiktoken.model", "spiece.model",
     "sentencepiece.bpe.model", "spm.model", "preprocessor_config.json", "processor_config.json", "image_processor.json",
     "image_processor_config.json", "video_preprocessor_config.json", "feature_extractor_config.json", "chat_template.json",
     "LICENSE.txt", "LICENSE-MIT", "LICENCE.md", "LICENSE-APACHE-2.0.txt", "NOTICE", "Notice.txt", "USE_POLICY.md", "license",
     "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "rwkv_vocab_v20230424.txt",
     "normalizer.json"],
)  # fmt: skip
def test_what_a_loader_reads_goes_along(name: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    touch(tmp_path, [name])
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.files, checkpoint.left_out) == ((name,), ())


@pytest.mark.parametrize(
    "name",
    ["token.json", "id_rsa", "license.key.bak", "tokenizer.json.bak", "tokenizer.json~", "vocab.txt.incomplete", "Icon\r",
     "tokenizer\u00a0.json", "LICENSE\u200b.txt", "a\nb.tiktoken", "a\\b.tiktoken", "LICENSE\n", "b\udcff.tiktoken",
     "t\u00e9.tiktoken"],
)  # fmt: skip
def test_what_no_loader_reads_or_no_output_can_be_named_stays(name: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    touch(tmp_path, [name])
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.files, checkpoint.left_out) == ((), (name,))


def test_code_goes_along_when_a_configuration_names_it(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    one = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "org/other--modeling_far.X", "odd": 5, "none": None}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": one}))
    two = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": two}))
    three = json.dumps({"auto_map": {"AutoProcessor": "processing_x.XProcessor"}})
    (tmp_path / "processor_config.json").write_text(f'{three[:-1]}, "odd": 1, "odd": 2}}')  # copied as it is too
    (tmp_path / "preprocessor_config.json").write_text("damaged: copied as it is")
    (tmp_path / "configuration_x.py").write_text(
        "import os\nfrom .shared import a\n  from . import deep, other as o\nfrom .gone import x"
    )
    (tmp_path / "shared.py").write_text(
        "from .configuration_x import XConfig\nfrom ..outside import a\n# from .comment import b"
    )
    touch(
        tmp_path, ["tokenization_x.py", "processing_x.py", "deep.py", "other.py", "modeling_far.py", "outside.py", "comment.py"]
    )
    touch(tmp_path, ["train.py", "setup.py"])
    checkpoint = open_checkpoint(tmp_path)
    code = [name for name in checkpoint.files if name.endswith(".py")]
    assert code == ["configuration_x.py", "deep.py", "other.py", "processing_x.py", "shared.py", "tokenization_x.py"]
    assert checkpoint.left_out == ("comment.py", "modeling_far.py", "outside.py", "setup.py", "train.py")


@pytest.mark.parametrize(
    "auto_map", [[], "modeling_x.X", 5, None, {"a": {}}, {"a": "../../etc/passwd.X"}, {"a": ""}, {"a": [[["x"]]]}]
)
def test_an_odd_auto_map_names_no_code(auto_map: Any, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    touch(tmp_path, ["modeling_y.py"])
    assert open_checkpoint(tmp_path).files == ("config.json",)


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "LICENSE"])
def test_a_pipe_or_device_in_the_place_of_a_file_is_refused_when_it_is_opened(
    name: str, make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    make(Path(name))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert name in str(caught.value)


def test_a_pipe_that_is_not_carried_is_only_left_out(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "events")
    assert open_checkpoint(tmp_path).left_out == ("events",)


def test_a_carried_file_of_absurd_size_is_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((1 << 30) + 1)
    refused(FormatError, "1,073,741,825 bytes", "tokenizer.json", ref=tmp_path)
    os.truncate(tmp_path / "tokenizer.json", 1 << 30)
    assert open_checkpoint(tmp_path).files == ("tokenizer.json",)


# How a checkpoint is named.


def test_a_folder_with_an_at_sign(tmp_path: Path) -> None:
    folder = tmp_path / "model@v2"
    folder.mkdir()
    save_file({"a": A}, folder / "model.safetensors")
    assert open_checkpoint(str(folder)).folder == folder


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file({"a": A}, tmp_path / "x.safetensors")
    assert list(open_checkpoint("~/x.safetensors").specs) == ["a"]


def test_what_does_not_exist_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-medic").mkdir()
    (tmp_path / "gone").symlink_to("nowhere")
    refused(NotFound, "no such folder or file", f"did you mean '{tmp_path}/llama-medic'?", ref=str(tmp_path / "llama-medik"))
    refused(NotFound, "did you mean 'llama-medic'?", ref=Path("./llama-medik"))
    (tmp_path / "llama-medic" / "q4.gguf").touch()
    refused(NotFound, "did you mean 'llama-medic/q4.gguf'?", ref="./llama-medic/q5.gguf")
    refused(NotFound, "not a Hub id, which has the form org/name", "'llama-medic'", ref="llama-medik")
    refused(NotFound, "a local path has no revisions", ref="./llama-medic@main")
    refused(NotFound, "broken symbolic link to nowhere", ref="gone")
    refused(NotFound, "Write a Hub model as org/name", ref="https://huggingface.co/org/name")
    refused(NotFound, "no such folder or file", ref="models/missing.safetensors")
    refused(NotFound, "no such folder or file", ref=Path("org/name"))
    refused(NotFound, "no such folder or file", ref="")
    refused(NotFound, "no such folder or file", ref="a\0b")
    refused(NotFound, "no such folder or file", ref="x" * 5000)
    refused(NotFound, "no such folder or file", ref="~nobody-of-this-name/x")
    (tmp_path / "weights.bin").write_bytes(b"")
    refused(FormatError, "not a PyTorch zip file", ref="weights.bin")
    (tmp_path / "weights.raw").write_bytes(b"")
    refused(Unsupported, "does not end with .safetensors, .bin, .pt, .pth, .ckpt or .gguf", ref="weights.raw")


def test_a_revision_is_in_the_name_or_beside_it() -> None:
    assert locate("org/name") == HubModel("org/name", None)
    assert locate("org/name@a") == locate("org/name", "a") == locate("org/name@a", "a") == HubModel("org/name", "a")


def test_revisions_that_cannot_be(tmp_path: Path) -> None:
    refused(ParameterError, "'main' for a local path", ref=tmp_path, revision="main")
    refused(ParameterError, "two revisions: 'a' in the name, and revision='b'", ref="org/name@a", revision="b")


# What the index says.


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ([], ["no weight_map object, but []"]),
        ({}, ["lists no tensor"]),
        ({"a": ONE, "b": 2}, ["'b' is in 2, which is not a string"]),
        ({"a": ONE, "b": "model-00003-of-00002.safetensors"}, ["'b'", "00003-of-00002.safetensors'", "does not exist"]),
        ({"a": ONE, "b": f"../x/{TWO}"}, ["tensor 'b'", "leaves the folder through '..'"]),
        ({"a": ONE, "b": ".."}, ["leaves the folder through '..'"]),
        ({"a": ONE, "b": f"..\\{TWO}"}, ["leaves the folder through '..'"]),
        ({"a": ONE, "b": "/etc/passwd"}, ["an absolute path"]),
        ({"a": ONE, "b": "C:\\x.safetensors"}, ["an absolute path"]),
        ({"a": ONE, "b": f"./{TWO}"}, ["a path separator"]),
        ({"a": ONE, "b": f"sub/{TWO}"}, ["a path separator"]),
        ({"a": ONE, "b": f"{TWO}\0"}, ["a path separator"]),
        ({"a": ONE, "b": "config.json"}, ["not a .safetensors file"]),
        ({"a": ONE, "b": ""}, ["not a .safetensors file"]),
        ({"a": ONE, "b": TWO, "c": TWO}, [f"'c' is in {TWO}, but no file has it"]),
        ({"a": TWO, "b": TWO}, [f"the index says that tensor 'a' is in {TWO}, but no file has it"]),
        ({"a": TWO, "b": ONE}, [f"the index says that tensor 'a' is in {TWO}, but it is in {ONE}"]),
    ],
)
def test_a_wrong_index_is_refused(weight_map: Any, words: list[str], tmp_path: Path) -> None:
    sharded(tmp_path, weight_map)
    message = refused(FormatError, *words, ref=tmp_path)
    assert message.startswith(f"{tmp_path / INDEX}: ")
    assert "\n  -> " in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["the index is not JSON"]),
        ("[1]", ["the index is not a JSON object"]),
        ('{"metadata": {}}', ["no weight_map object, but only the keys ['metadata']"]),
        (f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}', ["the name 'a' twice"]),
        ('{"weight_map":' * 100_000, ["nested too deeply"]),
    ],
)
def test_an_index_that_is_no_index(text: str, words: list[str], tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    refused(FormatError, *words, ref=tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    save_file({"b": B, "mtp.w": A}, sharded(tmp_path) / TWO)
    refused(FormatError, "1 tensor(s) that the index does not list, the first is 'mtp.w' in", TWO, ref=tmp_path)


@pytest.mark.parametrize(
    ("pickled", "names", "read"),
    [
        ("pytorch_model", (ONE, TWO), False),  # transformers finds shards through their index alone
        ("pytorch_model", ("consolidated.safetensors",), False),
        ("pytorch_model", ("weights.safetensors",), False),
        ("pytorch_model", ("model.fp16.safetensors",), False),
        ("pytorch_model", ("diffusion_pytorch_model.safetensors",), False),
        ("pytorch_model", (ONE, TWO, "consolidated.safetensors.index.json"), False),
        ("pytorch_model", (ONE, TWO, "model.safetensors.index.json"), True),
        ("pytorch_model", ("model.safetensors",), True),
        ("diffusion_pytorch_model", ("model.safetensors",), True),
        ("diffusion_pytorch_model", ("diffusion_pytorch_model.safetensors",), True),
        ("diffusion_pytorch_model", ("other.safetensors",), False),
    ],
)
def test_safetensors_that_transformers_does_not_find_do_not_replace_pytorch_model_bin(
    pickled: str, names: tuple[str, ...], read: bool, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    weights = [name for name in names if not name.endswith(".json")]
    for name, tensors in zip(weights, ({"a": A}, {"b": B}), strict=False):
        save_file(tensors, tmp_path / name)
    for name in set(names).difference(weights):
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": ONE, "b": TWO}}))
    torch.save({"a": torch.tensor(A + 1)}, tmp_path / f"{pickled}.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], A if read else A + 1)
        assert checkpoint.weights == (tuple(weights) if read else (f"{pickled}.bin",))
        if not read:
            (note,) = checkpoint.notes
            assert note.what.startswith(f"{pickled}.bin is read")
            assert all(name in note.what for name in weights[:2])
            assert checkpoint.ignored == tuple(weights)


@pytest.mark.parametrize("shard", [False, True])
def test_an_index_of_pickles_counts_only_beside_a_shard(shard: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file({"a": A}, tmp_path / "weights.safetensors")
    name = "pytorch_model-00001-of-00001.bin"
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    if shard:
        torch.save({"a": torch.tensor(A + 1)}, tmp_path / name)
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], A + shard)
        assert len(checkpoint.notes) == shard


def test_shards_that_an_index_leaves_out_are_counted_without_a_list_of_them() -> None:
    """A few small files could name billions."""
    unlisted = unlisted_shards([f"s{number}-00001-of-999999999.safetensors" for number in range(40)], ())
    assert (unlisted.there, unlisted.count) == ((), 40 * 999_999_998)
    assert unlisted.lost[:2] == ("s0-00002-of-999999999.safetensors", "s0-00003-of-999999999.safetensors")


def test_missing_shards_are_named_with_the_width_of_the_others() -> None:
    unlisted = unlisted_shards([f"model-{number:05d}-of-000163.safetensors" for number in range(1, 163)], ())
    assert (unlisted.lost, unlisted.count) == (("model-00163-of-000163.safetensors",), 1)


@pytest.mark.parametrize("there", [True, False])
def test_a_shard_that_the_index_leaves_out_is_noted(there: bool, tmp_path: Path) -> None:
    """Its numbers say that it belongs to the model, which would be written without its tensors."""
    sharded(tmp_path, {"a": ONE})
    if not there:
        (tmp_path / TWO).unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.specs) == ["a"]
        (note,) = checkpoint.notes
        if there:
            assert note.what == f"its index has no tensor of {TWO}, so nothing is read from there"
        else:
            assert note.what.startswith("its shards are numbered as if there were 1 more")
            assert note.what.endswith(f": {TWO}")
    sharded(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.notes == ()


@pytest.mark.parametrize("with_index", [True, False])
def test_a_tensor_in_two_files_is_refused(with_index: bool, tmp_path: Path) -> None:
    save_file({"b": B, "a": A[:2]}, sharded(tmp_path) / TWO)
    if not with_index:
        (tmp_path / INDEX).unlink()
    refused(FormatError, "tensor 'a' is in two files", f"{ONE}  [4, 3] F32", f"{TWO}  [2, 3] F32", ref=tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    os.truncate(sharded(tmp_path) / TWO, (tmp_path / TWO).stat().st_size - 5)
    refused(FormatError, f"{tmp_path / TWO}: truncated: 5 of 48 bytes", ref=tmp_path)


def test_files_without_a_tensor_are_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    refused(FormatError, "the weight files contain no tensors", ref=tmp_path)


@pytest.mark.parametrize(
    "stored",
    [
        ("_orig_mod.lm_head.weight", "_orig_mod.model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "model.layers.0._orig_mod.mlp.up_proj.weight"),
        ("_fsdp_wrapped_module.lm_head.weight", "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight"),
        ("lm_head.weight", "model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight"),
        ("module.lm_head.weight", "module.model.layers.0.mlp.up_proj.weight"),
        ("module._orig_mod.lm_head.weight", "module._orig_mod.model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_what_wrappers_of_torch_add_to_names_is_left_out(stored: tuple[str, str], tmp_path: Path) -> None:
    """transformers would leave the model at random numbers: it finds no tensor under such a name."""
    arrays = np.ones((2, 3), np.float32), np.full((3, 2), 2, np.float32)
    save_file(dict(zip(stored, arrays, strict=True)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with open_checkpoint(tmp_path) as model:
        assert list(model.specs) == ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
        for name, array in zip(model, arrays, strict=True):
            np.testing.assert_array_equal(model[name], array)
        assert "without what torch's wrappers added" in str(model.notes[0])


def test_norms_have_the_names_that_transformers_gives_them(tmp_path: Path) -> None:
    """Most BERT models on the Hub have the names of TensorFlow's, and fine-tunes of them the current ones."""
    names = ["bert.embeddings.LayerNorm.beta", "bert.embeddings.LayerNorm.gamma", "bert.layer.0.gamma"]
    arrays = [np.full(2, k, np.float32) for k in range(3)]
    save_file(dict(zip(names, arrays, strict=True)), tmp_path / "model.safetensors")
    current = ["bert.embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.weight", "bert.layer.0.gamma"]
    for config in ('{"model_type": "bert"}', '{"architectures": ["BertForMaskedLM"]}'):  # as in the first releases
        (tmp_path / "config.json").write_text(config)
        with open_checkpoint(tmp_path) as model:
            assert list(model.specs) == current
            np.testing.assert_array_equal(np.stack([model[name] for name in model]), np.stack(arrays))
            assert model.notes == ()
    twice = {name: array for name, array in zip([names[1], "bert.embeddings.LayerNorm.weight"], arrays, strict=False)}
    save_file(twice, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as model:
        assert list(model.specs) == list(twice)
    (tmp_path / "config.json").unlink()
    save_file({names[1]: arrays[0]}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as model:  # a network of any kind
        assert list(model.specs) == names[1:2]


def test_names_that_only_look_wrapped_stay(tmp_path: Path) -> None:
    names = ["module.lm_head.weight", "vision_module.up.weight"]
    save_file(dict.fromkeys(names, np.ones(2, np.float32)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with open_checkpoint(tmp_path) as model:
        assert list(model.specs) == names
        assert model.notes == ()
    save_file({"module.w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").unlink()
    with open_checkpoint(tmp_path) as model:  # a network of any kind
        assert list(model.specs) == ["module.w"]


def test_a_tensor_stored_with_and_without_a_wrapper_is_refused(tmp_path: Path) -> None:
    save_file(dict.fromkeys(["_orig_mod.w", "w"], np.ones(2, np.float32)), tmp_path / "model.safetensors")
    refused(FormatError, "'_orig_mod.w' and 'w' are the same tensor for a loader", ref=tmp_path)


# config.json, links, quantisation.


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"{", ["config.json is not JSON"]),
        (b"[]", ["config.json is not a JSON object"]),
        (b"\xff", ["config.json is not UTF-8"]),
        (b'{"a":' * 100_000, ["nested too deeply"]),
        (b" " * (MAX_CONFIG_BYTES + 1), ["16,777,217 bytes, and at most 16,777,216"]),
    ],
)
def test_a_bad_config_is_refused(config: bytes, words: list[str], tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(config)
    refused(FormatError, *words, ref=tmp_path)


def test_a_name_twice_in_a_config_is_taken_as_everywhere_else(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"n": 1, "n": 2}')
    assert open_checkpoint(tmp_path).config == {"n": 2}


def test_weights_may_be_links_to_anywhere(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "elsewhere")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to("../elsewhere")
    with open_checkpoint(tmp_path / "m") as c:
        assert arrays(c) == {"a": A.tolist()}
    (tmp_path / "elsewhere").unlink()
    refused(NotFound, "a symbolic link to ../elsewhere, which does not exist", ref=tmp_path / "m")


def test_a_carried_file_may_not_be_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"a": A}, folder / "model.safetensors")
    (tmp_path / "id_rsa").write_text("secret")
    link = folder / "tokenizer.json"
    link.symlink_to("../id_rsa")
    refused(CheckpointError, "tokenizer.json is a symbolic link that leaves the folder", "cp --remove", ref=folder)
    link.unlink()
    link.symlink_to("config.json")
    refused(NotFound, "tokenizer.json is a symbolic link to", "not a file", ref=folder)
    (folder / "config.json").write_text("{}")  # inside the folder is fine
    assert open_checkpoint(folder).files == ("config.json", "tokenizer.json")
    for place, published, fine in (
        ("models--org--name/blobs", "tokenizer.json", True),  # and so is the Hub's cache
        ("models--org--other/blobs", "secret.json", False),
        ("models--org--none/blobs", "", False),
        ("home/blobs", "tokenizer.json", False),
        ("models--x/blobs/deep", "tokenizer.json", False),
    ):
        blob = tmp_path / place / ("a" * 40)
        blob.parent.mkdir(parents=True)
        blob.write_text("{}")
        if published:
            snapshot = blob.parent.parent / "snapshots" / "c"
            snapshot.mkdir(parents=True)
            (snapshot / published).symlink_to(blob)
        link.unlink()
        link.symlink_to(blob)
        if fine:
            assert open_checkpoint(folder).files == ("config.json", "tokenizer.json")
        else:
            refused(CheckpointError, "a symbolic link that leaves the folder", ref=folder)


@pytest.mark.parametrize(
    ("config", "tensors", "described"),
    [
        ({}, {"w.weight": A}, None),
        ({"quantization_config": None}, {"w.weight": A}, None),
        ({"quantization_config": {}}, {"w.weight": A}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, {"w": A}, "'fp8' (quantization_config in config.json)"),
        (
            {"text_config": {"quantization_config": {"quant_method": "awq", "bits": 4}}},
            {"w": A},
            "'awq', 4 bits (text_config.quantization_config in config.json)",
        ),
        ({}, {"w.weight_scale_inv": A}, "fp8 in blocks (tensor 'w.weight_scale_inv')"),
        ({}, {"w.qweight": B}, "GPTQ or AWQ (tensor 'w.qweight')"),
        ({}, {"e.down_blocks": B, "e.down_scales": B}, "MXFP4 (tensor 'e.down_scales')"),
        ({}, {"e.down_blocks": B, "e.other_scales": B}, None),
        ({}, {"w.weight": B.view(np.int8), "w.weight_scale": A}, "I8 with scales (tensor 'w.weight_scale')"),
        ({}, {"w.weight": A, "w.weight_scale": A}, None),
        ({}, {"w.weight": A.view(np.uint32), "w.scales": A, "w.biases": A}, "MLX (tensor 'w.scales')"),
        ({}, {"w.weight": A, "w.scales": A}, None),
    ],
)
def test_quantised_checkpoints_are_recognised(
    config: dict[str, Any], tensors: Mapping[str, np.ndarray], described: str | None, tmp_path: Path
) -> None:
    save_file(dict(tensors), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).quantised == described


# Order and identity.


def test_tensors_are_in_natural_order_of_their_names(tmp_path: Path) -> None:
    names = ["m.9.a", "m.10.a", "m.2.b", "m.2.a", "m.02.a", "z", "embed", f"m.{'1' * 5000}.a"]
    save_file({name: B for name in names}, tmp_path / "model.safetensors")
    expected = ["embed", "m.02.a", "m.2.a", "m.2.b", "m.9.a", "m.10.a", f"m.{'1' * 5000}.a", "z"]
    assert list(open_checkpoint(tmp_path).specs) == expected


def test_the_identity_is_of_names_sizes_and_headers(tmp_path: Path) -> None:
    first = open_checkpoint(sharded(tmp_path / "x"))
    (tmp_path / "y").mkdir()
    save_file({"b": B + 1}, tmp_path / "y" / TWO)  # other data, other order, no index
    save_file({"a": A}, tmp_path / "y" / ONE)
    same = open_checkpoint(tmp_path / "y")
    assert first.identity == same.identity
    assert len(first.identity) == 32
    save_file({"a": A.astype(np.int32)}, tmp_path / "y" / ONE)
    assert open_checkpoint(tmp_path / "y").identity != first.identity
    (tmp_path / "x" / INDEX).unlink()
    for name in (ONE, TWO):
        (tmp_path / "x" / name).rename(tmp_path / "x" / f"other-{name}")
    assert open_checkpoint(tmp_path / "x").identity != first.identity


def test_the_state_follows_the_modification_time(tmp_path: Path) -> None:
    before = open_checkpoint(sharded(tmp_path))
    assert open_checkpoint(tmp_path).state == before.state
    os.utime(tmp_path / ONE, ns=(1, 1))
    after = open_checkpoint(tmp_path)
    assert after.state != before.state
    assert after.identity == before.identity


def test_metadata_on_which_files_disagree_is_left_out(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "1.safetensors", metadata={"format": "pt", "rank": "0"})
    save_file({"b": A}, tmp_path / "2.safetensors", metadata={"format": "pt", "rank": "1"})
    assert open_checkpoint(tmp_path).metadata == {"format": "pt"}


# Reading.


def test_read_gives_the_values_in_every_dtype(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    raw = torch.arange(48, dtype=torch.uint8)
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
    save_torch({str(k): raw.clone().view(k).reshape(2, -1) for k in kinds}, tmp_path / "a.safetensors")
    with open_checkpoint(tmp_path / "a.safetensors") as c:
        for kind in kinds:
            array = c.read(str(kind))
            assert str(array.dtype) == str(kind).removeprefix("torch.")
            assert array.tobytes() == raw.numpy().tobytes()
            np.testing.assert_array_equal(array.astype(np.float64), raw.view(kind).reshape(2, -1).to(torch.float64).numpy())


def test_read_takes_row_ranges(tmp_path: Path) -> None:
    tensors = {"a": A, "empty": np.zeros((0, 3), np.float32), "flat": np.zeros((3, 0), np.float32)}
    save_file({**tensors, "scalar": np.array(5, np.float16), "flag": np.array([True, False])}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as c:
        cases = [
            slice(None),
            slice(1, 3),
            slice(-1, None),
            slice(2, 99),
            slice(3, 1),
            slice(0, 0),
            slice(None, None, 1),
        ]
        for rows in cases:
            for name, array in tensors.items():
                read = c.read(name, rows)
                np.testing.assert_array_equal(read, array[rows], strict=True)
        np.testing.assert_array_equal(c.read("scalar"), np.array(5, np.float16), strict=True)
        np.testing.assert_array_equal(c.read("flag"), np.array([True, False]), strict=True)
        with pytest.raises(ParameterError, match="'scalar' has no rows"):
            c.read("scalar", slice(0, 1))
        with pytest.raises(ParameterError, match="the step of rows must be 1, not 2"):
            c.read("a", slice(0, 4, 2))
        with pytest.raises(NotFound, match=r"no tensor 'scaler' \(did you mean 'scalar'\?\)"):
            c.read("scaler")


def test_only_the_bytes_of_the_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": A}, tmp_path / "m.safetensors")
    seen = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: seen.append((at, len(views[0]))) or real(fd, views, at))
    with open_checkpoint(tmp_path / "m.safetensors") as c:
        seen.clear()  # the header
        c.read("a", slice(1, 3))
        place = c.location("a")
        assert place is not None
        assert seen == [(place[1] + 12, 24)]


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": A}, tmp_path / "m.safetensors")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
    with open_checkpoint(tmp_path / "m.safetensors") as c:
        np.testing.assert_array_equal(c.read("a"), A)


def test_read_into_fills_part_of_a_tensor(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as c:
        buffer = np.zeros(10, np.uint8)
        c.read_into("a", 5, buffer[:8])
        assert buffer.tobytes() == A.tobytes()[5:13] + bytes(2)
        c.read_into("a", 0, memoryview(buffer))
        assert buffer.tobytes() == A.tobytes()[:10]
        c.read_into("a", 48, buffer[:0])
        for start, n in ((-1, 2), (40, 9), (49, 0)):
            with pytest.raises(ParameterError, match="are not inside tensor 'a' of 48 bytes"):
                c.read_into("a", start, buffer[:n])
        assert bytes(buffer) == A.tobytes()[:10], "a refused read wrote something"


def test_location_is_where_the_bytes_are(tmp_path: Path) -> None:
    with open_checkpoint(sharded(tmp_path)) as c:
        for name, array in (("a", A), ("b", B)):
            place = c.location(name)
            assert place is not None
            fd, offset = place
            assert os.pread(fd, array.nbytes, offset) == array.tobytes()
            assert not os.get_inheritable(fd)


def test_big_endian_machines_get_swapped_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = np.arange(4).astype(ml_dtypes.bfloat16)
    save_file({"a": A, "u": bf16.view(np.uint16), "i": B.view(np.int8)}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as c:
        monkeypatch.setattr("sys.byteorder", "big")
        assert c.read("a").tobytes() == A.byteswap().tobytes()
        assert c.read("u").tobytes() == bf16.view(np.uint16).byteswap().tobytes()
        assert c.read("i").tobytes() == B.tobytes()


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full((64, 64), i, np.int32) for i in range(40)}
    for name, array in tensors.items():
        save_file({name: array}, tmp_path / f"{name}.safetensors")
    start = threading.Barrier(8)
    with open_checkpoint(tmp_path) as c, ThreadPoolExecutor(8) as pool:

        def read(_: int) -> bool:
            start.wait()
            return all((c.read(name) == array).all() for name, array in tensors.items())

        assert all(pool.map(read, range(8)))
        assert len({(c.location(name) or (-1, 0))[0] for name in tensors}) == 40, "a file was opened twice"


def test_threads_that_meet_at_the_first_read_open_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": A}, tmp_path / "m.safetensors")
    opened = []
    real = os.open

    def slow(*args: Any) -> int:
        opened.append(args[0])
        time.sleep(0.05)
        return real(*args)

    with open_checkpoint(tmp_path / "m.safetensors") as c, ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(os, "open", slow)
        assert len(set(pool.map(c.location, ["a"] * 4))) == 1
        assert len(opened) == 1


# Files that change, and limits.


def test_a_file_that_changed_since_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": A}, path)
    with open_checkpoint(path) as c:
        save_file({"a": A + 1}, path)
        os.utime(path, ns=(5, 5))
        with pytest.raises(CheckpointError, match="the file changed after it was opened"):
            c.read("a")
        path.unlink()
        with pytest.raises(CheckpointError, match="cannot be read: No such file"):
            c.read("a")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": A}, path)
    with open_checkpoint(path) as c:
        c.location("a")
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(FormatError, match=r"the file shrank while reading tensor 'a': .* 8 bytes early"):
            c.read("a")


def test_after_close_nothing_is_read_and_no_file_stays_open(tmp_path: Path) -> None:
    c = open_checkpoint(sharded(tmp_path))
    fd, _ = c.location("a") or (-1, 0)
    c.close()
    c.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(CheckpointError, match="this checkpoint is closed"):
        c.read("a")


def test_a_forgotten_checkpoint_closes_its_files(tmp_path: Path) -> None:
    c = open_checkpoint(sharded(tmp_path))
    fd, _ = c.location("a") or (-1, 0)
    del c
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_more_shards_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    for i in range(30):
        save_file({f"t{i}": B}, tmp_path / f"{i}.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
        with open_checkpoint(tmp_path) as c:
            assert len(arrays(c)) == 30
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_more_files_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": A}, tmp_path / "m.safetensors")

    def refuse(*args: Any) -> int:
        raise OSError(24, "Too many open files")

    with open_checkpoint(tmp_path / "m.safetensors") as c:
        monkeypatch.setattr(files, "raise_open_files", lambda count: False)
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match=r"Too many open files\n  -> Raise the limit: `ulimit -n 65536`."):
            c.read("a")


def test_an_io_error_names_tensor_file_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": A}, tmp_path / "m.safetensors")

    def fail(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    with open_checkpoint(tmp_path / "m.safetensors") as c:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"m\.safetensors: tensor 'a' cannot be read at byte .*Input/output"):
            c.read("a")


# ---- the sample of the weights


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_sample_sees_a_change_of_every_file_and_none_of_a_copy(count: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [0, 100, 20_000] if count == 3 else [20_000] * count
    for name in ("model", "copy"):
        (tmp_path / name).mkdir()
    contents = [rng.bytes(size) for size in sizes]
    paths = [[tmp_path / name / str(i) for i in range(count)] for name in ("model", "copy")]
    for folder in paths:
        for path, content in zip(folder, contents, strict=True):
            path.write_bytes(content)
    sample = files.sample_files(paths[0])
    assert files.sample_files(paths[1]) == sample
    for path, content in zip(paths[1], contents, strict=True):
        if content:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            assert files.sample_files(paths[1]) != sample
            path.write_bytes(content)


def test_the_sample_reads_few_pages_of_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk with cold caches each costs milliseconds."""
    paths = [tmp_path / str(i) for i in range(20)]
    for path in paths:
        path.write_bytes(bytes(100_000))
    read: list[int] = []
    monkeypatch.setattr("weightsmith._base.files.LocalFile.read_at", lambda self, at, n: read.append(n) or b"")
    files.sample_files(paths)
    files.sample_files(paths[:1])
    assert read == [4096] * (20 + 32)


BASE_COMMIT, ADAPTER_COMMIT = "c" * 40, "d" * 40


@pytest.mark.parametrize(
    ("ref", "revision", "name"),
    [
        ("org/base", BASE_COMMIT, f"org/base@{BASE_COMMIT}"),
        ("org/base@main", BASE_COMMIT, f"org/base@{BASE_COMMIT}"),
        ("hf://org/base", BASE_COMMIT, f"hf://org/base@{BASE_COMMIT}"),
        ("org/base@main+org/lora@v1", f"{BASE_COMMIT}+{ADAPTER_COMMIT}", f"org/base@{BASE_COMMIT}+org/lora@{ADAPTER_COMMIT}"),
        ("./base+org/lora", f"+{ADAPTER_COMMIT}", f"./base+org/lora@{ADAPTER_COMMIT}"),
        ("org/base+./lora", BASE_COMMIT, f"org/base@{BASE_COMMIT}+./lora"),
        ("./base", "", "./base"),
        ("./a+b+c", "", "./a+b+c"),
        ("s3://bucket/base", BASE_COMMIT, "s3://bucket/base"),
        ("https://host/base", "0123abc", "https://host/base"),
    ],
)
def test_a_model_on_the_hub_is_passed_on_with_its_commit(ref: str, revision: str, name: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as opened:
        model = Checkpoint(ref, opened.source, ModelFolder(tmp_path, revision))
        assert os.fspath(model) == name
