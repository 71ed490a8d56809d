"""What `weightsmith auto` refuses before anything is computed: nothing is written, and each problem is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.reports.auto.test_auto import FINE_TUNES, pristine, with_head, work
from weightsmith._base.errors import ParameterError, PlanError, StoreError
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._reports.auto import auto as module

__all__ = ["pristine", "work"]


@pytest.fixture(autouse=True)
def nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model writes a text or is scored."""

    def fail(*_given: Any, **_more: Any) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr(module, "write_own", fail)
    monkeypatch.setattr(module, "Pool", fail)


def refused(fine_tunes: tuple[str, ...], base: str = "base", text: dict[str, str] | None = None, **options: Any) -> str:
    """The message, the same by `auto` and by `plan_auto`. Nothing is written."""
    before = sorted(path.name for path in Path().iterdir())
    messages = set()
    for call in (weightsmith.auto, weightsmith.plan_auto):
        with pytest.raises((PlanError, ParameterError, StoreError)) as error:
            call(base, fine_tunes, "merged", text=text, **options)
        messages.add(str(error.value))
    assert sorted(path.name for path in Path().iterdir()) == before
    [message] = messages
    assert "Nothing was written." in message
    return message


def copied(name: str, out: str) -> Path:
    return Path(shutil.copytree(Path(name).resolve(), out))


def edited(path: Path, change: Callable[[Any], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_all_bad_texts_are_named_together(work: Path) -> None:
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("The cat has 3 cats. " * 4)
    message = refused(FINE_TUNES, text={"fr": "empty.txt", "de": "short.txt"})
    assert "empty.txt: it has fewer than two tokens" in message
    assert "short.txt: the text has 2 rows of 32 tokens, and 8 are needed" in message
    message = refused(FINE_TUNES, text={"fr": "none.txt", "de": "fr"})
    assert "none.txt" in message
    assert "the text 'fr' is not a .txt, .jsonl or .parquet file" in message


@pytest.mark.long
def test_a_copy_of_another_model_is_found_by_its_weights(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied("base", "same")
    assert "same: its weights are those of base" in refused(("fr", "same"))
    copied("fr", "again")
    assert "again: its weights are those of fr" in refused(("fr", "again"))
    monkeypatch.setattr(Checkpoint, "sample", lambda _checkpoint: "alike on some pages")
    assert "again: its weights are those of fr" in refused(("fr", "again"))
    weightsmith.plan_auto("base", FINE_TUNES, "merged")


def test_two_names_of_one_folder_are_one_model(work: Path) -> None:
    assert "./fr: a model is named twice" in refused(("fr", "./fr"))
    Path("link").symlink_to("base")
    assert "link: a model is named twice" in refused(("fr", "link"))


@pytest.mark.long
@pytest.mark.parametrize("text", [None, {"fr": "fr.txt", "other": "de.txt"}])
def test_another_tokenizer_is_found_before_a_model_writes(work: Path, text: dict[str, str] | None) -> None:
    copied("de", "other")

    def reverse(tokenizer: Any) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = dict(zip(vocabulary, [*vocabulary.values()][::-1], strict=True))

    edited(Path("other/tokenizer.json"), reverse)
    message = refused(("fr", "other"), text=text)
    assert "other: its tokenizer cuts a text into other tokens than that of the other models" in message
    assert "transplant-tokenizer" in message


def test_an_output_that_is_a_fine_tune_is_refused(work: Path) -> None:
    """Weightsmith made it, so it could be replaced."""
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": "fr"}]}, "merged", progress=False)
    assert "the output folder is the input merged" in refused(("merged", "de"), overwrite=True)
    assert Path("merged/model.safetensors").is_file()


@pytest.mark.long
def test_settings_that_change_predictions_are_named_with_both_values(work: Path) -> None:
    copied("de", "other")

    def change(config: Any) -> None:
        config["rms_norm_eps"] = 0.25
        config["torch_dtype"] = "float32"  # changes no prediction

    edited(Path("other/config.json"), change)
    message = refused(("fr", "other"))
    assert "other: its tensors or its config.json are not those of the other models\n" in message
    assert "  rms_norm_eps: 0.25 here, 1e-06 in the others\n" in message
    assert "dtype" not in message
    assert "other: its tensors or its config.json are not those of" in refused(("fr", "de"), base="other")


@pytest.mark.long
@pytest.mark.parametrize("both", [True, False])
def test_a_head_that_is_a_copy_of_the_embedding_is_no_difference(work: Path, both: bool) -> None:
    """Trainers store both names of a tied tensor."""
    with_head("base", "my-base")
    for name, change in (("fr", 1), ("de", 1 if both else None)):
        with_head(name, f"my-{name}", change)
    assert weightsmith.plan_auto("my-base", ["my-fr", "my-de"], "merged", text={"my-fr": "fr.txt", "my-de": "de.txt"})


def test_a_trained_head_of_a_tied_model_is_a_difference(work: Path) -> None:
    with_head("base", "my-base")
    for name in FINE_TUNES:
        with_head(name, f"my-{name}", 2)
    message = refused(("my-fr", "my-de"), "my-base")
    assert "its head lm_head.weight is stored and differs from model.embed_tokens.weight" in message


def test_an_architecture_that_does_not_run_here_is_refused(work: Path) -> None:
    for name in ("base", *FINE_TUNES):
        copied(name, f"my-{name}")
        edited(Path(f"my-{name}/config.json"), lambda config: config.update(model_type="zz9", architectures=["Zz9"]))
    assert "my-base: transformers cannot build a model of type 'zz9'" in refused(("my-fr", "my-de"), base="my-base")


def test_a_fine_tune_without_a_tokenizer_is_named(work: Path) -> None:
    copied("fr", "bare")
    Path("bare/tokenizer.json").unlink()
    assert "tokenizer.json" in refused(("bare", "de"), text={"bare": "fr.txt", "de": "de.txt"})
