"""Hub models without network: huggingface_hub's own client against a stand-in for the Hub, and its cache."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

import weightsmith
from tests.fake_hub import COMMIT, FakeHub, cache, environment, serve, silent
from tests.fork_help import forked
from weightsmith._base.errors import CheckpointError, WeightsmithError
from weightsmith._files.hub import _explain, _first_lines
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._planning.planner.inputs import open_models
from weightsmith._planning.recipe.values import parse_reference

OLD = "0" * 40
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A = np.arange(6, dtype=np.float32)

BIN_INDEX = "pytorch_model.bin.index.json"
BIN_ONE, BIN_TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def pickled(tensors: dict[str, np.ndarray]) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, file)
    return file.getvalue()


TOKENS = b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}'
LORA = {f"base_model.model.w.lora_{part}.weight": A[:2].reshape(shape) for part, shape in (("A", (1, 2)), ("B", (2, 1)))}
CONFIG = {"model_type": "llama", "auto_map": {"AutoModel": "modeling_x.XModel"}}
GOOD = {
    ONE: save({"a": A}),
    TWO: save({"b": A + 1}),
    INDEX: json.dumps({"weight_map": {"a": ONE, "b": TWO}}).encode(),
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "modeling_x.py": b"raise SystemExit('never run')",
    "README.md": b"# card",
    "consolidated.safetensors": save({"a": A, "b": A}),
    "pytorch_model.bin": b"a pickle",
    "original/params.json": b"{}",
}
REPOS = {
    ("org/good", COMMIT): GOOD,
    ("org/embedder", COMMIT): {
        "model.safetensors": save({"a": A}),
        "config.json": b"{}",
        "modules.json": b'[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]',
        "1_Pooling/config.json": b'{"pooling_mode": "cls"}',
        "2_Dense/config.json": b'{"in_features": 3}',
        "2_Dense/model.safetensors": save({"linear.weight": A + 2}),
        "additional_chat_templates/tool_use.jinja": b"TOOLS",
        "onnx/config.json": b"{}",
        "onnx/model.onnx": b"",
    },
    ("org/pipeline", COMMIT): {
        "model_index.json": json.dumps(
            {"_class_name": "P", **{part: ["a", "B"] for part in ("unet", "vae", "tokenizer")}}
        ).encode(),
        "unet/config.json": b'{"_class_name": "X"}',
        "unet/diffusion_pytorch_model.safetensors": save({"w": A}),
        "unet/diffusion_pytorch_model.fp16.safetensors": save({"w": A.astype("float16")}),
        "vae/config.json": b'{"_class_name": "Y"}',
        "vae/diffusion_pytorch_model.safetensors": save({"w": A + 1}),
        "tokenizer/vocab.json": b"{}",
        "whole.safetensors": save({"w": A}),
        "vae_decoder/model.onnx": b"",
    },
    ("org/good", OLD): {"model.safetensors": save({"old": A})},
    ("org/pickles", COMMIT): {"pytorch_model.pkl": b"a pickle", "config.json": b"{}", "tokenizer.json": b"[]"},
    ("org/gguf", COMMIT): {"x.Q4_K_M.gguf": b"GGUF"},
    ("org/adapter", COMMIT): {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "lora_alpha": 2}',
        "adapter_model.safetensors": save(LORA),
        "adapter_model.bin": b"a pickle",
        "tokenizer.json": b"{}",
        "README.md": b"# card",
    },
    ("org/chat-base", COMMIT): {
        "model.safetensors": save({"w.weight": A[:4].reshape(2, 2)}),
        "config.json": b"{}",
        "tokenizer.json": TOKENS,
        "tokenizer_config.json": b"{}",
    },
    ("org/chat-adapter", COMMIT): {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "lora_alpha": 2}',
        "adapter_model.safetensors": save(LORA),
        "tokenizer.json": TOKENS,
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"CHAT",
        "training_args.bin": b"a pickle",
    },
    ("org/old-adapter", COMMIT): {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "lora_alpha": 2}',
        "adapter_model.bin": pickled(LORA),
    },
    ("org/torch", COMMIT): {
        BIN_ONE: pickled({"a": A}),
        BIN_TWO: pickled({"b": A + 1}),
        BIN_INDEX: json.dumps({"weight_map": {"a": BIN_ONE, "b": BIN_TWO}}).encode(),
        "config.json": b"{}",
        "training_args.bin": b"a pickle",
        "optimizer.pt": b"a pickle",
        "other.bin": b"a pickle",
    },
    ("org/matrix", COMMIT): {"model.safetensors": save({"w.weight": A[:4].reshape(2, 2)})},
    ("org/escape", COMMIT): GOOD | {INDEX: json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()},
}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with serve(REPOS, {"v1": OLD}) as hub:
        yield hub


def opened(ref: str, **options: Any) -> dict[str, Any]:
    with open_checkpoint(ref, **options) as c:
        return {
            "revision": c.revision, "folder": str(c.folder), "files": c.files, "ignored": c.ignored, "config": c.config,
            "weights": c.weights, "tensors": {name: c.read(name).tolist() for name in c.specs},
            "cached": sorted(path.name for path in c.folder.iterdir()), "notes": [note.what for note in c.notes],
        }  # fmt: skip


def applied(ref: str) -> dict[str, Any]:
    """A model with an adapter."""
    with ExitStack() as stack:
        (model,), problems = open_models([parse_reference(ref, "")], stack)
        if model is None:
            return {"error": [str(problem) for problem in problems]}
        model.download()
        return {name: model.read(name).tolist() for name in model.specs} | {"revision": model.revision}


def later(ref: str) -> dict[str, Any]:
    """Tensors that are read before and after the download."""
    with open_checkpoint(ref, download=False) as c:
        try:
            answer: dict[str, Any] = {"read": c.read("a").tolist()}
        except CheckpointError as error:
            answer = {"error": str(error)}
        answer["missing"] = {path.name: nbytes for path, nbytes in c.missing.items()}
        planned = c.identity
        c.download()
        with open_checkpoint(ref) as fresh:
            answer["same"] = (planned, c.state) == (fresh.identity, fresh.state)
        return answer | {"a": c.read("a").tolist(), "left": list(c.missing)}


def run(
    hub: FakeHub | None, home: Path, ref: str, *, look: Callable[..., dict[str, Any]] = opened, **options: Any
) -> dict[str, Any]:
    """What a process of its own sees of `ref`: huggingface_hub reads its environment once."""
    env = environment(home) | {"HF_HUB_OFFLINE": "1"}
    if hub is not None:
        hub.seen.clear()
        env = hub.environment(home)

    def work() -> None:
        try:
            print(json.dumps(look(ref, **options)))
        except WeightsmithError as error:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))

    done = forked(work, env, home)
    assert done.code == 0, done.err
    result: dict[str, Any] = json.loads(done.out)
    return result


def downloads(hub: FakeHub) -> set[str]:
    return hub.downloads()


@pytest.mark.long
def test_the_subfolders_that_loaders_read_are_downloaded_and_found_offline(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/embedder")
    assert got["tensors"] == {"2_Dense/linear.weight": (A + 2).tolist(), "a": A.tolist()}
    assert got["weights"] == ["model.safetensors", "2_Dense/model.safetensors"]
    inner = ["1_Pooling/config.json", "2_Dense/config.json", "additional_chat_templates/tool_use.jinja"]
    assert got["files"] == [*inner, "config.json", "modules.json"]
    assert downloads(hub) == {*got["files"], *got["weights"]}
    again = run(hub, tmp_path, "org/embedder")
    assert (again, downloads(hub)) == (got, set())
    assert run(None, tmp_path, "org/embedder")["tensors"] == got["tensors"]


@pytest.mark.long
def test_the_parts_of_a_pipeline_are_downloaded_and_nothing_beside_them(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/pipeline")
    assert got["tensors"] == {"unet/w": A.tolist(), "vae/w": (A + 1).tolist()}
    assert got["files"] == ["model_index.json", "tokenizer/vocab.json", "unet/config.json", "vae/config.json"]
    assert downloads(hub) == {*got["files"], *(f"{part}/diffusion_pytorch_model.safetensors" for part in ("unet", "vae"))}
    assert run(None, tmp_path, "org/pipeline")["tensors"] == got["tensors"]


@pytest.mark.slow
def test_a_hub_model_is_downloaded_once_and_then_found_offline(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/good")
    assert got["tensors"] == {"a": A.tolist(), "b": (A + 1).tolist()}
    assert got["revision"] == COMMIT
    assert Path(got["folder"]).is_relative_to(tmp_path / "hub")
    assert (got["config"], got["weights"]) == (CONFIG, [ONE, TWO])
    assert got["files"] == ["config.json", "modeling_x.py", "tokenizer.json"]
    assert got["ignored"] == ["consolidated.safetensors"]
    needed = {ONE, TWO, INDEX, "README.md", *got["files"]}
    assert downloads(hub) == needed
    assert set(got["cached"]) == needed

    again = run(hub, tmp_path, "org/good")
    assert again == got
    assert downloads(hub) == set()

    offline = run(None, tmp_path, "org/good")
    assert offline == got | {"ignored": []}  # it is not in the cache
    assert run(None, tmp_path, f"org/good@{COMMIT}") == offline


@pytest.mark.long
def test_an_adapter_s_two_files_are_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    expected = {"w.weight": [[0.0, 1.0], [2.0, 5.0]], "revision": f"{COMMIT}+{COMMIT}"}
    assert run(hub, tmp_path, f"org/matrix+org/adapter@{COMMIT}", look=applied) == expected
    assert downloads(hub) == {"model.safetensors", "adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert run(None, tmp_path, f"org/matrix+org/adapter@{COMMIT}", look=applied) == expected
    (no_adapter,) = run(hub, tmp_path, "org/matrix+org/good", look=applied)["error"]
    assert "org/good: not a PEFT adapter: it has no adapter_config.json and no adapter_model.safetensors" in no_adapter
    (gone,) = run(hub, tmp_path, "org/matrix+org/none", look=applied)["error"]
    assert "org/none: neither a local path nor a model on the Hub" in gone


def written(ref: str) -> dict[str, Any]:
    """The files of an output that do not describe how it was made, and its chat template."""
    done = weightsmith.merge(
        {"merge_method": "linear", "models": [{"model": ref, "parameters": {"weight": 1}}]}, "out", progress=False, fsync=False
    )
    names = sorted(path.name for path in done.out.iterdir())
    template = done.out / "chat_template.jinja"
    return {"files": names, "template": template.read_text() if template.exists() else ""}


@pytest.mark.long
def test_the_tokenizer_beside_an_adapter_on_the_hub_is_found(hub: FakeHub, tmp_path: Path) -> None:
    """As beside one in a folder: here the base has no chat template."""
    got = run(hub, tmp_path, "org/chat-base+org/chat-adapter", look=written)
    assert got["template"] == "CHAT"
    assert {"tokenizer.json", "tokenizer_config.json"} <= {*got["files"]}
    assert "training_args.bin" not in downloads(hub)


@pytest.mark.long
def test_an_adapter_without_safetensors_is_downloaded_as_a_pickle(hub: FakeHub, tmp_path: Path) -> None:
    expected = run(hub, tmp_path, "org/matrix+org/adapter", look=applied)
    assert run(hub, tmp_path, "org/matrix+org/old-adapter", look=applied) == expected
    assert downloads(hub) == {"adapter_config.json", "adapter_model.bin"}
    assert run(None, tmp_path, "org/matrix+org/old-adapter", look=applied) == expected


@pytest.mark.long
def test_of_pytorch_files_those_of_the_model_are_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/torch")
    assert got["tensors"] == {"a": A.tolist(), "b": (A + 1).tolist()}
    assert (got["weights"], got["ignored"]) == ([BIN_ONE, BIN_TWO], ["other.bin"])
    assert downloads(hub) == {BIN_ONE, BIN_TWO, BIN_INDEX, "config.json"}
    assert run(None, tmp_path, "org/torch") == got | {"ignored": []}


@pytest.mark.long
def test_revisions(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/good@v1")
    assert (got["revision"], got["tensors"], got["config"]) == (OLD, {"old": A.tolist()}, None)
    assert run(hub, tmp_path, "org/good", revision=OLD)["tensors"] == {"old": A.tolist()}
    gone = run(hub, tmp_path, "org/good@v9")
    assert gone["error"] == "NotFound"
    assert gone["message"].startswith("org/good@v9: the Hub model exists, but not this revision")


@pytest.mark.long
@pytest.mark.parametrize(
    ("repo", "error", "words"),
    [
        ("org/pickles", "Unsupported", "org/pickles: no weights in a format that is read"),
        ("org/escape", "FormatError", "leaves the folder through '..'"),
        ("org/gated", "CheckpointError", "org/gated: this Hub model is gated"),
        ("org/none", "NotFound", "org/none: neither a local path nor a model on the Hub"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_before_weights_are_downloaded(
    repo: str, error: str, words: str, hub: FakeHub, tmp_path: Path
) -> None:
    got = run(hub, tmp_path, repo)
    assert got["error"] == error
    assert words in got["message"]
    assert downloads(hub) <= {"config.json", INDEX}


@pytest.mark.long
def test_a_damaged_gguf_file_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/gguf")
    assert got["error"] == "FormatError"
    assert "x.Q4_K_M.gguf: 4 bytes: too short for a GGUF file" in got["message"]
    assert downloads(hub) == {"x.Q4_K_M.gguf"}


@pytest.mark.long
def test_the_token_and_the_cache_folder_are_used(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/good", token="hf_secret", cache_dir=str(tmp_path / "elsewhere"))
    assert Path(got["folder"]).is_relative_to(tmp_path / "elsewhere")
    assert {seen.authorization for seen in hub.seen} == {"Bearer hf_secret"}
    assert not (tmp_path / "hub").exists()


@pytest.mark.long
def test_offline_the_cache_is_enough(tmp_path: Path) -> None:
    snapshot = cache(tmp_path, {name: data for name, data in GOOD.items() if "/" not in name})
    (snapshot / "original").mkdir()
    got = run(None, tmp_path, "org/cached")
    assert (got["revision"], got["folder"], got["weights"]) == (COMMIT, str(snapshot), [ONE, TWO])
    assert got["tensors"] == {"a": A.tolist(), "b": (A + 1).tolist()}
    assert got["files"] == ["config.json", "modeling_x.py", "tokenizer.json"]
    assert run(None, tmp_path, str(snapshot))["files"] == got["files"]  # the snapshot's path is a local folder like any


@pytest.mark.long
def test_offline_a_half_downloaded_model_is_noticed(tmp_path: Path) -> None:
    cache(tmp_path, {name: GOOD[name] for name in (ONE, INDEX, "config.json")})
    got = run(None, tmp_path, "org/cached")
    assert got["error"] == "FormatError"
    assert f"names the file '{TWO}' (tensor 'b'), which does not exist" in got["message"]


@pytest.mark.long
def test_offline_and_not_cached(tmp_path: Path) -> None:
    (tmp_path / "models" / "llama-medic").mkdir(parents=True)
    got = run(None, tmp_path, "models/llama-medik")
    assert got["error"] == "NotFound"
    assert "neither a local path nor a model in the Hub cache" in got["message"]
    assert "did you mean 'models/llama-medic'?" in got["message"]


@pytest.mark.long
def test_a_hub_that_is_not_reached_is_an_error_or_the_cache(tmp_path: Path) -> None:
    with silent() as dead:
        pass  # the port is known, and nobody listens
    got = run(dead, tmp_path, "org/cached")
    assert got["error"] == "NotFound"
    assert f"{dead.url} did not answer (ConnectError" in got["message"]
    cache(tmp_path, {"model.safetensors": save({"a": A})})
    got = run(dead, tmp_path, "org/cached")
    assert got["tensors"] == {"a": A.tolist()}
    (note,) = got["notes"]
    assert (
        f"did not answer (ConnectError, timeout 10 s), so the cached revision {COMMIT} is used; it may be out of date" in note
    )


@pytest.mark.long
def test_tensors_are_read_after_the_download(hub: FakeHub, tmp_path: Path) -> None:
    got = run(hub, tmp_path, "org/good", look=later)
    assert "not downloaded: only its header was read from the Hub" in got["error"]
    assert got["missing"] == {name: len(GOOD[name]) for name in (ONE, TWO, "tokenizer.json", "README.md")}
    assert (got["a"], got["left"], got["same"]) == (A.tolist(), [], True)


@pytest.mark.long
def test_an_impossible_hub_id(tmp_path: Path) -> None:
    got = run(None, tmp_path, "org/a--b")
    assert (got["error"], "nor a valid Hub id" in got["message"]) == ("NotFound", True)


@pytest.mark.slow
def test_a_local_folder_wins_over_a_hub_id(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org" / "good").mkdir(parents=True)
    (tmp_path / "org" / "good" / "model.safetensors").write_bytes(save({"local": A}))
    assert run(hub, tmp_path, "org/good")["tensors"] == {"local": A.tolist()}
    assert hub.seen == []


def test_no_error_of_the_hub_shows_a_signature() -> None:
    said = "403 Forbidden: None.\nCannot access content at: https://cas.example/a?X-Amz-Signature=s3cret&X-Amz-Expires=1.\nMore"
    for shown in (str(_explain(OSError(said), "org/m")), _first_lines(OSError(said))):
        assert "Cannot access content at: https://cas.example/a?..." in shown
        assert "s3cret" not in shown
