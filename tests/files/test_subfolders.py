"""Which subfolders of a model loaders read, and which of their files go into a new model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightsmith._base.errors import CheckpointError, FormatError
from weightsmith._files import subfolders
from weightsmith._files.copied import choose_copied, copied_files, left_out_findings
from weightsmith._files.subfolders import MAX_DEPTH, MAX_FILES, MAX_MODULES, list_names, module_folders, module_steps


def write(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return list_names(folder)


def modules(*paths: Any, kind: str = "sentence_transformers.models.Dense") -> str:
    return json.dumps([{"idx": i, "name": str(i), "path": path, "type": kind} for i, path in enumerate(paths)])


def test_modules_and_those_of_routers_are_subfolders(tmp_path: Path) -> None:
    types = json.dumps({"types": {"query_0_Static": "sentence_transformers.models.StaticEmbedding"}})
    names = write(tmp_path, {"modules.json": modules("", "1_Pooling", "2_Router/"), "2_Router/router_config.json": types})
    assert module_folders(tmp_path, names) == ("1_Pooling", "2_Router", "2_Router/query_0_Static")
    written = {"modules.json": modules("./", "./1_Pooling", "2 Dense/")}
    assert module_folders(tmp_path, write(tmp_path, written)) == ("1_Pooling", "2 Dense")


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b", ".git", "a\\b", "a/b/c/d", "x" + "\0"])
def test_a_module_outside_the_model_is_refused(path: str, tmp_path: Path) -> None:
    names = write(tmp_path, {"modules.json": modules("", path)})
    with pytest.raises(FormatError, match="no subfolder of the model"):
        module_folders(tmp_path, names)


@pytest.mark.parametrize("text", ["[", "{}", "[1, null]", '[{"path": 3}]', "[" * 100 + "]" * 100])
def test_a_damaged_list_of_modules_is_left_to_its_loader(text: str, tmp_path: Path) -> None:
    assert module_folders(tmp_path, write(tmp_path, {"modules.json": text})) == ()


@pytest.mark.long
def test_modules_and_their_files_are_bounded(tmp_path: Path) -> None:
    many = tmp_path / "many"
    names = write(many, {"modules.json": modules(*(f"{i}_Dense" for i in range(MAX_MODULES + 1)))})
    with pytest.raises(FormatError, match="101 modules"):
        module_folders(many, names)
    full = tmp_path / "full"
    names = write(full, {"modules.json": modules("1_Dense"), **{f"1_Dense/{i}.json": "" for i in range(MAX_FILES + 5)}})
    assert len(names) == MAX_FILES + 2, "no more are looked at"
    with pytest.raises(CheckpointError, match="over 1,000 files"):
        module_folders(full, names)


def test_files_are_listed_to_a_depth_and_hidden_folders_are_not_entered(tmp_path: Path) -> None:
    inside = "/".join("a" * (MAX_DEPTH - 1))
    write(tmp_path, {f"{inside}/x.py": "", f"{inside}/b/y.py": "", ".git/config": "", "config.json": ""})
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    names = list_names(tmp_path)
    assert {f"{inside}/x.py", "config.json", "a/loop/config.json"} <= set(names)
    assert not any(name.count("/") >= MAX_DEPTH or name.startswith(".git/") for name in names)


MODEL = {
    "config.json": "{}",
    "model.safetensors": "",
    "chat_template.jinja": "",
    "additional_chat_templates/tool_use.jinja": "TOOLS",
    "additional_chat_templates/notes.txt": "",
    "modules.json": modules("", "1_Pooling", "2_Dense"),
    "1_Pooling/config.json": "{}",
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "",
    "2_Dense/id_rsa": "",
    "qformer_tokenizer/tokenizer.json": "{}",
    "qformer_tokenizer/tokenizer_config.json": "{}",
    "speech_tokenizer/model.safetensors": "",
    "speech_tokenizer/tokenizer.json": "{}",
    "speech_tokenizer/config.json": "{}",
    "onnx/model.onnx": "",
    "onnx/config.json": "{}",
    "original/tokenizer.model": "",
    "checkpoint-500/config.json": "{}",
}
COPIED = [
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config.json",
    "modules.json",
    "qformer_tokenizer/tokenizer.json",
    "qformer_tokenizer/tokenizer_config.json",
]


def test_what_loaders_read_in_subfolders_is_copied_and_the_rest_is_said(tmp_path: Path) -> None:
    names = write(tmp_path, MODEL)
    files, left_out = choose_copied(tmp_path, names, {}, module_folders(tmp_path, names))
    assert list(files) == COPIED
    assert left_out == ("2_Dense/id_rsa", "additional_chat_templates/notes.txt", "speech_tokenizer/")
    assert ["subfolder" in finding.what for finding in left_out_findings(left_out, "a")] == [False, True]


CODE = {
    "modeling_x.py": "from .parts import attention\nfrom .single import (\n    a,\n    b,\n)\n",
    "parts/__init__.py": "",
    "parts/attention.py": "from ..shared import f\nfrom .inner.kernel import g\n",
    "parts/inner/__init__.py": "",
    "parts/inner/kernel.py": "from .... import outside",
    "single.py": "",
    "shared.py": "",
    "parts/unused.py": "",
    "train.py": "",
    "tools/convert.py": "",
    "custom_st.py": "",
    "code/model.py": "",
}


def test_packages_that_the_code_of_a_model_imports_are_copied(tmp_path: Path) -> None:
    names = write(tmp_path, {**CODE, "modules.json": modules("", kind="custom_st.Transformer")})
    config = {"auto_map": {"AutoModel": "modeling_x.XModel", "AutoConfig": "code/model.XConfig", "AutoTokenizer": "o/r--t.T"}}
    files, left_out = choose_copied(tmp_path, names, config)
    unused = {"parts/unused.py", "train.py", "tools/convert.py"}
    assert set(files) == CODE.keys() - unused | {"modules.json"}
    assert left_out == ("train.py",)


def test_code_outside_the_folder_is_never_named(tmp_path: Path) -> None:
    names = write(tmp_path, {"modeling_x.py": "from ..secret import a\nfrom ... import b", "secret.py": ""})
    files, _ = choose_copied(tmp_path, names, {"auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": "../secret.C"}})
    assert files == ("modeling_x.py",)


def test_a_model_has_no_thousand_files_in_subfolders(tmp_path: Path) -> None:
    names = [f"additional_chat_templates/{i}.jinja" for i in range(MAX_FILES + 1)]
    assert len(copied_files(names)) == MAX_FILES + 1
    with pytest.raises(CheckpointError, match="files in subfolders"):
        choose_copied(tmp_path, names, {})


def test_modules_of_a_server_are_those_of_the_file() -> None:
    assert subfolders.folders_in(modules("", "1_Pooling", "../x").encode()) == ("1_Pooling",)
    assert subfolders.folders_in(b"[[[") == ()


@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        ({"pooling_mode": ["cls", "mean"]}, "cls, mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls, mean"),
        ({"pooling_mode": ["max", "mean"]}, "max, mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max, mean"),
        ({"pooling_mode": "max", "pooling_mode_cls_token": True}, "max"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}, "mean"),
        ({}, "mean"),
        ({"pooling_mode": "cls", "include_prompt": False}, "cls, without the prompt"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
        ({"pooling_mode": [3, "cls"]}, "cls"),
    ],
)
def test_both_spellings_of_a_pooling_are_the_same(settings: dict[str, Any], detail: str, tmp_path: Path) -> None:
    kind = "sentence_transformers.models.Pooling"
    write(tmp_path, {"modules.json": modules("1_Pooling", kind=kind), "1_Pooling/config.json": json.dumps(settings)})
    assert module_steps(tmp_path) == f"Pooling ({detail})"
