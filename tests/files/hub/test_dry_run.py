"""A plan of Hub models reads headers by byte range; a merge downloads after everything else was checked."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from tests.cli_help import Ran
from tests.fake_hub import COMMIT, FakeHub, Files, cache, environment, serve, silent
from tests.fork_help import forked_cli
from weightsmith._files.remote import folder as files

WEIGHTS = "model.safetensors"
CONFIG = json.dumps({"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}).encode()


def tensors(seed: int) -> dict[str, np.ndarray]:
    """1.2 MB: many times what is read of a header."""
    rng = np.random.default_rng(seed)
    return {f"model.layers.0.mlp.{part}.weight": rng.normal(size=(320, 320)).astype(np.float32) for part in ("a", "b", "c")}


def pickled(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    return file.getvalue()


def repos() -> dict[tuple[str, str], Files]:
    small = {"config.json": CONFIG, "tokenizer.json": b"{}", "README.md": b"# card"}
    return {
        ("org/base", COMMIT): {**small, WEIGHTS: save(tensors(0))},
        ("org/tuned", COMMIT): {**small, WEIGHTS: save(tensors(1))},
        ("org/torch", COMMIT): {**small, "pytorch_model.bin": pickled(tensors(2))},
    }


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve(repos()) as hub:
        yield hub


def weightsmith(hub: FakeHub | None, home: Path, *args: object, **env: str) -> Ran:
    variables = (environment(home) if hub is None else hub.environment(home)) | env
    return forked_cli(*args, env=variables, cwd=home)


def recipe(folder: Path, *models: str, weight: str = "0.5") -> Path:
    path = folder / "recipe.yml"
    lines = "".join(f"  - model: {model}\n    parameters: {{weight: {weight}}}\n" for model in models)
    path.write_text(f"merge_method: linear\nmodels:\n{lines}")
    return path


def cached(home: Path) -> set[str]:
    return {path.name for path in home.glob("hub/*/snapshots/*/*")}


@pytest.mark.long
@pytest.mark.parametrize("other", ["org/tuned", "org/torch"])
def test_a_plan_reads_headers_by_byte_range_and_a_merge_downloads_the_rest(other: str, hub: FakeHub, tmp_path: Path) -> None:
    path = recipe(tmp_path, "org/base", other)
    weights = {WEIGHTS} if other == "org/tuned" else {WEIGHTS, "pytorch_model.bin"}
    planned = weightsmith(hub, tmp_path, "plan", path, "--json")
    assert planned.code == 0, planned.err
    assert hub.whole() == {"config.json"}
    spans = [seen.range.removeprefix("bytes=").split("-") for seen in hub.seen if seen.range]
    assert 2 <= len(spans) <= 12
    assert sum(int(last) - int(first) + 1 for first, last in spans) < 400_000
    assert cached(tmp_path) == {"config.json"}
    summary = json.loads(planned.out)["summary"]
    sizes = {(repo, name): len(data) for (repo, _), files in hub.repos.items() for name, data in files.items()}
    expected = {
        (repo, name)
        for repo, name in sizes
        if repo in ("org/base", other) and name in (*weights, "tokenizer.json", "README.md")
    }
    assert {(d["model"], d["file"]): d["bytes"] for d in summary["downloads"]} == {key: sizes[key] for key in expected}
    assert summary["download_bytes"] == sum(sizes[key] for key in expected)

    (tmp_path / "plan.json").write_text(planned.out)
    hub.seen.clear()
    done = weightsmith(hub, tmp_path, "run", "plan.json", tmp_path / "out")
    assert done.code == 0, done.err
    assert weights <= hub.whole()
    merged = load_file(tmp_path / "out" / WEIGHTS)
    for name, array in tensors(0).items():
        np.testing.assert_allclose(merged[name], (array + tensors(1 if other == "org/tuned" else 2)[name]) / 2, atol=1e-6)
    assert (tmp_path / "out/tokenizer.json").is_file()

    hub.seen.clear()
    again = weightsmith(hub, tmp_path, "plan", path)
    assert "download" not in again.out
    assert hub.downloads() == set()


@pytest.mark.long
def test_a_plan_of_a_vocabulary_downloads_tokenizers_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    repositories: dict[tuple[str, str], Files] = {}
    for name, special in (("base", "<s>"), ("tuned", "<im>")):
        vocab = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}
        tokenizer = {**vocab, "added_tokens": [{"id": 2, "content": special, "special": True}]}
        embedding = rng.normal(size=(3, 40_000)).astype(np.float32)
        repositories["org/" + name, COMMIT] = {
            "config.json": CONFIG,
            "tokenizer.json": json.dumps(tokenizer).encode(),
            "generation_config.json": b'{"eos_token_id": 2}',
            WEIGHTS: save({"model.embed_tokens.weight": embedding, "model.layers.0.a.weight": embedding}),
        }
    with serve(repositories) as hub:
        path = recipe(tmp_path, "org/base", "org/tuned")
        path.write_text(path.read_text() + "tokenizer_source: union\n")
        planned = weightsmith(hub, tmp_path, "plan", path)
        assert planned.code == 0, planned.err
        assert "of org/base, and 1 token added: <im>" in planned.out
        assert hub.whole() == {"config.json", "tokenizer.json", "generation_config.json"}
        done = weightsmith(hub, tmp_path, "merge", path, tmp_path / "out")
        assert done.code == 0, done.err
    rows = load_file(tmp_path / "out" / WEIGHTS)["model.embed_tokens.weight"]
    assert rows.shape == (4, 40_000)
    np.testing.assert_array_equal(rows[3], embedding[2])


@pytest.mark.matrix("False-options0", "True-options1")
@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--stream",)])
@pytest.mark.parametrize("staged", [False, True])
def test_a_head_that_was_trained_apart_is_found_when_it_is_downloaded(
    staged: bool, options: tuple[str, ...], tmp_path: Path
) -> None:
    """config.json ties it to the embedding, and the other model stores one tensor for both."""
    rng = np.random.default_rng(0)
    config = json.dumps({**json.loads(CONFIG), "tie_word_embeddings": True}).encode()
    embedding, layer = rng.normal(size=(2, 300, 320)).astype(np.float32)
    plain = {"model.embed_tokens.weight": embedding, "model.layers.0.a.weight": layer}
    repositories: dict[tuple[str, str], Files] = {
        (f"org/{name}", COMMIT): {"config.json": config, WEIGHTS: save({**plain, **head})}
        for name, head in (
            ("base", {}),
            ("copied", {"lm_head.weight": embedding}),
            ("trained", {"lm_head.weight": embedding + 1}),
        )
    }
    with serve(repositories) as hub:
        for name, code in (("copied", 0), ("trained", 1)):
            path = recipe(tmp_path, "org/base", f"org/{name}")
            if staged:
                path.write_text(f"name: one\n{path.read_text()}---\nmerge_method: passthrough\nmodels:\n  - model: one\n")
            planned = weightsmith(hub, tmp_path, "plan", path, "--json")
            assert planned.code == 0, planned.err
            saved = path.with_name(f"{name}.json")
            saved.write_text(planned.out)
            for part in ((), ("--part", "1/2")):
                ran = weightsmith(hub, tmp_path, "run", saved, tmp_path / f"{name}-run{len(part)}", *part, *options)
                assert ran.code == code, ran.err
                assert "differs from model.embed_tokens.weight" in ran.err or code == 0
            if staged:
                kept = weightsmith(hub, tmp_path, "merge", path, tmp_path / f"{name}-kept", "--keep-stages", *options)
                assert kept.code == code, kept.err
                assert bool([*tmp_path.glob(f"{name}-kept.stage-*")]) == (code == 0)
            done = weightsmith(hub, tmp_path, "merge", path, tmp_path / name, *options)
            assert done.code == code, done.err
        assert "its head lm_head.weight is stored and differs from model.embed_tokens.weight" in done.err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name in ("copied", "trained")] == ["copied"]


@pytest.mark.long
def test_the_first_plan_compares_tokenizers_whose_sizes_differ(tmp_path: Path) -> None:
    repositories = {}
    for name, added in (("base", []), ("tuned", [{"id": 2, "content": "<think>"}])):
        tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": added}
        embedding = np.ones((4, 40_000), np.float32)
        repositories["org/" + name, COMMIT] = {
            "config.json": CONFIG,
            "tokenizer.json": json.dumps(tokenizer).encode(),
            WEIGHTS: save({"model.embed_tokens.weight": embedding, "model.layers.0.a.weight": embedding}),
        }
    with serve(repositories) as hub:
        planned = weightsmith(hub, tmp_path, "plan", recipe(tmp_path, "org/base", "org/tuned"))
        assert hub.whole() == {"config.json", "tokenizer.json"}
    assert planned.code == 0, planned.err
    assert "which lacks tokens of other models" in planned.out + planned.err


@pytest.mark.long
def test_a_plan_says_in_words_what_would_be_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    planned = weightsmith(hub, tmp_path, "plan", recipe(tmp_path, "org/base", "org/tuned"))
    assert "download 2.46 MB in 6 files, before the merge begins; only headers were read" in planned.out


@pytest.mark.slow
def test_mistakes_cost_no_download(hub: FakeHub, tmp_path: Path) -> None:
    wrong = weightsmith(hub, tmp_path, "merge", recipe(tmp_path, "org/base", "org/tuned", weight="heavy"), "out")
    assert wrong.code == 1
    assert hub.downloads() <= {"config.json", WEIGHTS}
    assert hub.whole() <= {"config.json"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    taken = weightsmith(hub, tmp_path, "merge", recipe(tmp_path, "org/base", "org/tuned"), "out")
    assert taken.code == 3, taken.err
    assert cached(tmp_path) == {"config.json"}


def test_parts_of_a_file_on_the_hub_are_its_bytes_in_few_requests() -> None:
    size = 3 * files.HEAD_BYTES
    data = np.random.default_rng(0).bytes(size)
    asked: list[tuple[int, int]] = []

    class Ranges:
        where, nbytes, version = "org/base", size, COMMIT

        def request(self, first: int, end: int) -> Iterator[bytes]:
            asked.append((first, end))
            yield data[first:end]

        def check_unchanged(self) -> None:
            pass

    file = files.RemoteFile(Ranges())
    head, range_, middle = files.HEAD_BYTES, files.RANGE_BYTES, size // 2
    for offset, nbytes, request in (
        (0, 8, (0, head)),
        (100, 1000, None),  # known
        (size - 22, 22, (size - range_, size)),  # a directory of a zip file is at its end
        (size - 500, 30, None),
        (size - 10, 50, None),  # to the end
        (size + 10, 5, None),
        (middle, 10, (middle, middle + range_)),
        (middle + range_ - 1, 1, None),
        (middle - 5, 2 * range_, (middle - 5, middle - 5 + 2 * range_)),
        (size - range_ - 1, 3, (size - range_ - 1, size - 1)),
    ):
        asked.clear()
        assert file.read_at(offset, nbytes) == data[offset : offset + nbytes]
        assert asked == ([] if request is None else [request])


@pytest.mark.long
def test_a_hub_without_byte_ranges_is_read_from_the_start_only(hub: FakeHub, tmp_path: Path) -> None:
    hub.ranges = False
    assert weightsmith(hub, tmp_path, "plan", recipe(tmp_path, "org/base", "org/tuned")).code == 0
    refused = weightsmith(hub, tmp_path, "plan", recipe(tmp_path, "org/base", "org/torch"))
    assert refused.code == 1
    assert "it does not know byte ranges" in refused.err
    assert cached(tmp_path) == {"config.json"}


@pytest.mark.long
def test_a_hub_that_lists_no_sizes_is_asked_for_them(hub: FakeHub, tmp_path: Path) -> None:
    hub.sizes = False
    planned = weightsmith(hub, tmp_path, "plan", recipe(tmp_path, "org/base", "org/tuned"))
    assert planned.code == 0, planned.err
    assert "download 2.46 MB in 6 files" in planned.out
    assert hub.whole() == {"config.json"}


@pytest.mark.long
def test_a_dry_run_leaves_the_cache_usable_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    old = "0" * 40
    for name in ("org/base", "org/tuned"):
        cache(tmp_path, hub.repos[name, COMMIT], name, old)
    path = recipe(tmp_path, "org/base", "org/tuned")
    refs = sorted(tmp_path.glob("hub/*/refs/main"))
    assert "download 2.46 MB" in weightsmith(hub, tmp_path, "plan", path).out
    assert [ref.read_text() for ref in refs] == [old, old]
    offline = weightsmith(None, tmp_path, "merge", path, "out", HF_HUB_OFFLINE="1")
    assert offline.code == 0, offline.err
    online = weightsmith(hub, tmp_path, "merge", path, "out", "--overwrite")
    assert online.code == 0, online.err
    assert [ref.read_text() for ref in refs] == [COMMIT, COMMIT]


def test_a_download_that_brings_a_part_only_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from weightsmith._base.errors import CheckpointError
    from weightsmith._files.hub import Repository

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(tmp_path))
    sizes = {"a.safetensors": 1, "b.safetensors": 2}
    repository = Repository("org/x", COMMIT, tmp_path, sizes, (), cache_dir=tmp_path, token=None)
    repository.want(sizes)
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"1 of 1 files were not downloaded, the first is 'b\.safetensors'"):
        repository.download()


def test_a_full_disk_is_not_called_a_silent_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from weightsmith._base.errors import CheckpointError
    from weightsmith._files.hub import Repository

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "blob"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    repository = Repository("org/x", COMMIT, tmp_path, {"a.safetensors": 1}, (), cache_dir=tmp_path, token=None)
    repository.want(["a.safetensors"])
    with pytest.raises(CheckpointError, match="the cache cannot be written: No space left on device") as caught:
        repository.download()
    assert str(tmp_path / "blob") in str(caught.value)


def test_a_revision_is_not_written_outside_the_cache(tmp_path: Path) -> None:
    from weightsmith._files import hub

    for revision in ("../../outside", str(tmp_path / "outside"), "main/../../../outside"):
        hub._write_ref(tmp_path / "models--org--x", revision, COMMIT)
    assert list(tmp_path.iterdir()) == []
    hub._write_ref(tmp_path / "models--org--x", "pr/1", COMMIT)
    assert (tmp_path / "models--org--x/refs/pr/1").read_text() == COMMIT


@pytest.mark.long
def test_a_hub_that_never_answers_is_an_error_or_the_cache(tmp_path: Path) -> None:
    path = recipe(tmp_path, "org/base", "org/tuned")
    with silent() as hub:
        refused = weightsmith(hub, tmp_path, "plan", path, HF_HUB_ETAG_TIMEOUT="1")
        assert refused.code == 1
        assert f"{hub.url} did not answer (ReadTimeout, timeout 1 s)" in refused.err
        assert f"cache  {tmp_path / 'hub'}" in refused.err
        for (name, commit), files in repos().items():
            cache(tmp_path, files, name, commit)
        planned = weightsmith(hub, tmp_path, "merge", path, "out", HF_HUB_ETAG_TIMEOUT="1")
        assert planned.code == 0, planned.err
    for name in ("org/base", "org/tuned"):
        assert f"{name}: {hub.url} did not answer (ReadTimeout, timeout 1 s), so the cached revision {COMMIT}" in planned.err


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    from weightsmith._base.errors import NotFound
    from weightsmith._files import hub

    asked = []

    def info(self: object, repo: str, **options: Any) -> None:
        asked.append(repo)
        raise TimeoutError("nothing")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(hub, "_silent", {})
    for name in ("org/one", "org/two"):
        with pytest.raises(NotFound, match="did not answer") as caught:
            hub.open_repository(name, None, cache_dir=tmp_path)
    assert asked == ["org/one"]
    assert [line.split(" ", 1)[0] for line in caught.value.finding.details] == ["https://huggingface.co", "cache"]
    monkeypatch.setattr(hub, "SILENT_SECONDS", -1.0)
    monkeypatch.setattr(hub, "_silent", {})
    for name in ("org/one", "org/two"):
        with pytest.raises(NotFound, match="did not answer"):
            hub.open_repository(name, None, cache_dir=tmp_path)
    assert asked == ["org/one", "org/one", "org/two"]


@pytest.mark.slow
def test_every_request_of_huggingface_hub_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    from weightsmith._files import hub

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(hub, "UPLOAD_SECONDS", 0.2)
    hub.bound_requests()
    hub.bound_requests()
    assert get_session().event_hooks["request"].count(hub._bound) == 1
    with silent() as never:
        for method in ("GET", "POST"):
            with pytest.raises(Exception, match="timed out") as caught:
                get_session().request(method, never.url, timeout=None)
            assert type(caught.value).__name__ == "ReadTimeout"


@pytest.mark.slow
def test_offline_without_the_model_says_how_to_get_it(tmp_path: Path) -> None:
    refused = weightsmith(None, tmp_path, "plan", recipe(tmp_path, "org/base@v1", "org/tuned"), HF_HUB_OFFLINE="1")
    assert refused.code == 1
    what = "neither a local path nor a model in the Hub cache, and HF_HUB_OFFLINE=1 forbids downloading it"
    assert f"org/base@v1: {what}" in refused.err
    assert f"cache  {tmp_path / 'hub'}" in refused.err
    assert "HF_HUB_OFFLINE=0 hf download org/base --revision v1" in refused.err


def test_a_token_is_not_in_a_representation(tmp_path: Path) -> None:
    from weightsmith._files.hub import Repository
    from weightsmith._files.remote.http import HttpFile

    repository = Repository("org/x", COMMIT, tmp_path, {"a.safetensors": 1}, (), cache_dir=tmp_path, token="hf_secret")
    file = HttpFile("https://x/y?X-Amz-Signature=hf_secret", "y", 1, "", {"authorization": "Bearer hf_secret"})
    assert "hf_secret" not in repr(repository) + repr(file)
