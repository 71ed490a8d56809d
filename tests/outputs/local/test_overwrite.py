"""`--overwrite` replaces a checkpoint, and nothing that is the user's: not one file more than weightsmith's own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.mini import write_checkpoint
from tests.output_help import build, layout, open_staging, put, tree
from tests.plan_help import model
from weightsmith._base.errors import OutputExists, StoreError
from weightsmith._outputs import disk
from weightsmith._outputs.area import OtherFiles, staging_folder
from weightsmith._outputs.checksum import StoredBytes, reread
from weightsmith._outputs.places import verify
from weightsmith._outputs.save import save_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def linear(*models: Any, **options: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": str(m)} for m in models], "parameters": {"weight": 1}, **options}


def merge(out: str | Path, *models: Any, **options: Any) -> None:
    weightsmith.merge(linear(*models, **options), out, overwrite=True, fsync=False)


def refused(folder: Path, out: str | Path, *models: Any, words: tuple[str, ...] = (), **options: Any) -> str:
    """A merge with overwrite is refused before any work, and everything under `folder` stays."""
    before = tree(folder)
    with pytest.raises(StoreError) as caught:
        merge(out, *models, **options)
    message = str(caught.value)
    assert tree(folder) == before
    assert "Nothing was written." in message
    assert "\n  -> " in message, "no next step"
    assert not staging_folder(Path(out)).exists()
    for word in words:
        assert word in message
    return message


# what the output folder holds


def test_a_folder_of_models_is_not_a_checkpoint(here: Path) -> None:
    zoo = here / "zoo"
    a, b = model(zoo / "a"), model(zoo / "b", seed=1)
    refused(here, zoo, a, b, words=("zoo/a",))
    c, d = model(here / "c"), model(here / "d")
    refused(here, zoo, c, d, words=("no weightsmith.json", "it holds a, b"))


def test_a_training_folder_is_not_replaced(here: Path) -> None:
    a = model(here / "a")
    run = Path(model(here / "run"))
    for name in ("checkpoint-500/model.safetensors", "optimizer.pt", "notes/thesis.txt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"mine")
    refused(here, run, a, words=("no weightsmith.json", "it holds checkpoint-500, config.json", "remove"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["notes.txt", "my_lora.safetensors", "optimizer.pt", "training_args.bin", "train.py", "sub/x", "empty/", ".env", "a.bak"],
)
def test_one_file_or_folder_that_is_not_of_the_checkpoint_is_enough(here: Path, name: str) -> None:
    a = model(here / "a")
    out = here / "out"
    merge(out, a)
    path = out / name.rstrip("/")
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name.endswith("/") else path.write_text("mine")
    refused(here, out, a, words=(name if name.endswith("/") else name.split("/")[0],))
    assert path.exists()


@pytest.mark.long
def test_the_first_few_are_named_and_the_rest_counted_no_further(here: Path) -> None:
    a = model(here / "a")
    merge("out", a)
    for i in range(500):
        (here / "out" / f"note{i:03}.txt").write_text("mine")
    message = refused(here, "out", a, words=("note000.txt", "and more"))
    assert len(message) < 1000


def test_a_listed_file_may_be_gone_and_a_listed_name_as_folder_is_not_ours(here: Path) -> None:
    a = model(here / "a")
    merge("out", a)
    (here / "out" / "recipe.yml").unlink()
    merge("out", a)
    (here / "out" / "recipe.yml").unlink()
    (here / "out" / "recipe.yml").mkdir()
    (here / "out" / "recipe.yml" / "thesis.txt").write_text("mine")
    refused(here, "out", a, words=("recipe.yml/",))


@pytest.mark.long
def test_files_in_folders_that_the_manifest_lists_are_ours(here: Path) -> None:
    def make(plan: str) -> None:
        with open_staging("out", layout(), plan, overwrite=True) as staging:
            put(staging)
            staging.add_file("1_Pooling/config.json", b"{}")
            staging.publish({}, fsync=False)

    make("one")
    make("two")
    (here / "out" / "1_Pooling" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"1_Pooling/notes\.txt"):
        make("three")


def test_a_checkpoint_that_weightsmith_did_not_make_is_not_replaced(here: Path) -> None:
    a = model(here / "a")
    out = Path(model(here / "out", seed=1))
    (out / "tokenizer.json").write_text("{}")
    refused(here, out, a, words=("weightsmith did not make it", "it holds config.json", "Choose another folder, or remove"))
    for manifest in ("{", ""):
        (out / "weightsmith.json").write_text(manifest)
        refused(here, out, a, words=("its weightsmith.json cannot be used",))


@pytest.mark.long
def test_a_manifest_that_was_copied_to_another_model_does_not_make_it_ours(here: Path) -> None:
    a = model(here / "a")
    merge("out", a)
    mine = Path(model(here / "mine", seed=1))  # of the same shapes: its files have the names and sizes of the output's
    for name in ("weightsmith.json", "README.md", "recipe.yml"):
        shutil.copy(here / "out" / name, mine / name)
    refused(here, mine, a, words=("changed after weightsmith wrote them", "model.safetensors"))


def test_weights_that_were_trained_in_place_are_kept(here: Path) -> None:
    a = model(here / "a")
    merge("out", a)
    weights = here / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)  # the same header, the same size
    refused(here, "out", a, words=("changed after weightsmith wrote them", "tensor ", "model.safetensors"))


def test_older_weights_that_were_moved_into_an_output_are_kept(here: Path) -> None:
    a, b = model(here / "a"), model(here / "b", seed=1)
    merge("first", b)
    merge("out", a)
    (here / "first" / "model.safetensors").replace(here / "out" / "model.safetensors")  # the same header, the same size
    refused(here, "out", a, words=("changed after weightsmith wrote them", "tensor ", "model.safetensors"))


@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_a_file_that_the_user_has_edited_is_kept(here: Path, name: str) -> None:
    a = model(here / "a")
    merge("out", a)
    text = (here / "out" / name).read_text()
    (here / "out" / name).write_text(text.swapcase())
    refused(here, "out", a, words=(name, "differs from what was written"))


def test_a_copy_of_an_output_is_replaced_whatever_the_times_of_its_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = model(here / "a")
    merge("out", a)
    shutil.copytree(here / "out", here / "copy", copy_function=shutil.copyfile)
    os.utime(here / "copy" / "weightsmith.json", (0, 0))
    read = [0]

    def counted(tensors: Sequence[StoredBytes], **options: Any) -> dict[str, str]:
        read[0] += len(tensors)
        return reread(tensors, **options)

    monkeypatch.setattr(sys.modules["weightsmith._outputs.manifest"], "reread", counted)
    merge("out", a)
    assert read[0] == 0, "nothing has touched it"
    merge("copy", a)
    assert read[0] == len(weightsmith.open_checkpoint(a).specs), "all of it was read, once"
    verify("copy")


def test_a_manifest_that_names_files_elsewhere_deletes_none(here: Path) -> None:
    from weightsmith._outputs.checksum import hash_bytes

    a = model(here / "a")
    merge("out", a)
    (here / "thesis.txt").write_text("years of work")
    whole = (here / "out" / "weightsmith.json").read_bytes()
    body = whole.split(b"\n", 2)[2].replace(b'"README.md"', b'"../thesis.txt"')
    assert b"../thesis.txt" in body
    (here / "out" / "weightsmith.json").write_bytes(b'{\n  "checksum": "' + hash_bytes(body).encode() + b'",\n' + body)
    refused(here, "out", a, words=("names files outside the folder",))


def test_a_listed_file_that_is_a_link_loses_nothing_but_the_link(here: Path) -> None:
    a = model(here / "a")
    merge("out", a)
    relink(here / "out", here / "weights")
    merge("out", a)
    verify("out")
    assert (here / "weights").is_file()


@pytest.mark.parametrize("name", ["config.json", "weightsmith.json"])
def test_a_pipe_in_the_output_folder_does_not_hang(here: Path, name: str) -> None:
    a = model(here / "a")
    (here / "out").mkdir()
    os.mkfifo(here / "out" / name)
    refused(here, "out", a)


# what the run reads


@pytest.mark.parametrize("out", ["zoo", "zoo/a", "zoo/a/inner"])
def test_an_output_that_is_or_holds_or_lies_in_an_input_is_refused(here: Path, out: str) -> None:
    a, b = model(here / "zoo" / "a"), model(here / "zoo" / "b")
    inner = build(here / "zoo" / "a" / "inner")
    assert inner.is_dir()
    refused(here, out, a, b, words=("zoo/a",))


def test_a_new_folder_in_an_input_loses_nothing(here: Path) -> None:
    a = model(here / "a")
    merge("a/out", a)
    verify("a/out")


def relink(folder: Path, target: Path) -> None:
    """Move a model's weight file, and leave a link in its place."""
    (folder / "model.safetensors").rename(target)
    (folder / "model.safetensors").symlink_to(target)


def test_weight_files_that_are_links_into_the_output_are_kept(here: Path) -> None:
    a = Path(model(here / "a"))
    out = Path(model(here / "out"))
    relink(a, out / "model.safetensors")
    refused(here, out, a, words=("a/model.safetensors", str(out)))


def test_a_link_that_passes_through_the_output_is_kept(here: Path) -> None:
    a = Path(model(here / "a"))
    out = Path(model(here / "out"))
    (a / "model.safetensors").rename(here / "blob")
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").symlink_to(here / "blob")
    (a / "model.safetensors").symlink_to(out / "model.safetensors")
    refused(here, out, a, words=("a/model.safetensors",))


def test_links_to_themselves_beside_an_input_are_no_problem(here: Path) -> None:
    a = Path(model(here / "a"))
    (a / "loop").symlink_to("loop")
    (a / "gone").symlink_to(here / "nowhere" / "x")
    (a / "up").symlink_to(here)
    merge("out", a)
    merge("out", a)
    verify("out")


def test_an_input_or_output_reached_through_a_link_is_the_same_folder(here: Path) -> None:
    real = here / "disk" / "models"
    model(real / "a")
    model(here / "b")
    (here / "models").symlink_to(real)
    refused(here, here / "models" / "a", real / "a", "b")
    refused(here, real / "a", here / "models" / "a", "b")


def test_a_lone_file_is_protected_and_its_folder_is_not(here: Path) -> None:
    model(here / "work")
    file = here / "work" / "model.safetensors"
    refused(here, "work", file, words=("work/model.safetensors",))
    (here / "work" / "config.json").unlink()
    merge("work/out", file)
    merge("work/out", file)
    verify("work/out")


def test_adapters_are_protected(here: Path) -> None:
    from tests.models.lora.test_lora import adapter, base

    a, lora = base(here / "a"), adapter(here / "lora")
    out = Path(model(here / "out"))
    (lora / "adapter_model.safetensors").rename(out / "model.safetensors")
    (lora / "adapter_model.safetensors").symlink_to(out / "model.safetensors")
    refused(here, out, f"{a}+{lora}", words=("lora/adapter_model.safetensors",))


def test_the_file_of_the_users_own_method_is_protected(here: Path) -> None:
    a = model(here / "a")
    out = Path(model(here / "out"))
    (out / "modeling_own.py").write_text(
        "import weightsmith\n@weightsmith.tensor_method\ndef first(models):\n    return models[0]\n"
    )
    recipe = linear(a) | {"merge_method": "out/modeling_own.py:first", "parameters": {}}
    before = tree(here)
    with pytest.raises(StoreError, match=r"modeling_own\.py"):
        weightsmith.merge(recipe, "out", overwrite=True, allow_code=True, fsync=False)
    assert tree(here) == before


# when


def test_it_is_checked_before_tensor_data_is_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = model(here / "a")
    merge("out", a)
    (here / "out" / "notes.txt").write_text("mine")
    monkeypatch.setattr("weightsmith._engine.local.run", lambda *_, **__: pytest.fail("read"))
    refused(here, "out", a)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_files_that_arrive_while_it_works_are_kept(here: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = build(here / "out", "old")
    if not can_exchange:
        monkeypatch.setattr(disk, "exchange", lambda *_: False)
    synced = OtherFiles.sync

    def slow(self: OtherFiles) -> None:
        synced(self)
        (out / "thesis.txt").write_text("years of work")

    monkeypatch.setattr(OtherFiles, "sync", slow)
    with open_staging(out, layout(), "new", overwrite=True) as staging:
        put(staging)
        with pytest.raises(OutputExists) as caught:
            staging.publish({})
    assert "thesis.txt" in str(caught.value)
    assert str(staging.folder) in str(caught.value), "the work is kept, and the message says where"
    assert (out / "thesis.txt").read_text() == "years of work"
    (out / "thesis.txt").unlink()
    monkeypatch.undo()
    build(out, "new", overwrite=True)
    assert verify(out).plan == "new"


def test_save_model_keeps_what_is_not_its_own(here: Path) -> None:
    import numpy as np

    save_model({"w": np.zeros(3)}, "out")
    save_model({"w": np.ones(3)}, "out", overwrite=True)
    (here / "out" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"notes\.txt"):
        save_model({"w": np.zeros(3)}, "out", overwrite=True)
    assert (here / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("key", ["prompts_file", "held_out_file"])
def test_texts_of_a_mixture_are_protected(here: Path, key: str) -> None:
    from tests.features.mixture.test_moe import config, llama, recipe

    models = {name: write_checkpoint(here / name, llama(seed), config()) for seed, name in enumerate(("base", "a", "b"))}
    out = Path(model(here / "out"))
    (out / "LICENSE").write_text("a text that the expert is for")
    source = recipe(models, ["a", "b"])
    source["experts"] = [{**expert, "positive_prompts": ["x"], key: "out/LICENSE"} for expert in source["experts"]]
    before = tree(here)
    with pytest.raises(StoreError, match=r"out/LICENSE"):
        weightsmith.moe(source, "out", overwrite=True, fsync=False)
    assert tree(here) == before


def test_a_saliency_file_is_protected(here: Path) -> None:
    from tests import moe_zoo

    donor = moe_zoo.store(here / "model", "own", moe_zoo.experts())
    out = Path(model(here / "out"))
    (out / "LICENSE").write_text('{"0": [0.5, 2, -1, 2]}')
    source = {"model": str(donor), "prune_experts": {"saliency": "out/LICENSE", "experts": 2}}
    before = tree(here)
    with pytest.raises(StoreError, match=r"out/LICENSE"):
        weightsmith.moe(source, "out", overwrite=True, fsync=False)
    assert tree(here) == before
