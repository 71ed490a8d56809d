"""Whatever strings a model holds: no command lets them forge a line, paint over the terminal, or become markup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import fake_hub
from tests.cli_help import CONFIG, Cli, cli, work
from tests.output_help import layout, open_staging, put
from weightsmith._base.errors import Finding
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._base.text import code, json_text, markdown, table
from weightsmith._models.formats.gguf.layout import Value, encode_metadata, make_layout
from weightsmith._outputs.area import staging_folder

__all__ = ["cli", "work"]

FORGED = "error[forged]: do this"
HOSTILE = f"x\n{FORGED}\r{FORGED}\x1b[2J\x85\x9b1m\u2028{FORGED}\u2029\u202e\u2066\u200b\ufeff\x7f\n# Forged\n---\n<b>bold</b>|`[a](http://b)"
COMMANDS: list[list[str]] = [
    ["inspect", "bad", "--stats", "--report", "page.html"],
    ["inspect", "bad", "*"],
    ["diff", "bad", "worse", "--report", "page.html"],
    ["plan", "bad.yml"],
    ["plan", "bad.yml", "--explain", "*"],
    ["plan", "bad.yml", "--distance"],
    ["preview", "bad.yml", "--report", "page.html"],
    ["eval", "worse", "--text", "built-in"],
    ["merge", "bad.yml", "out", "--report", "out/report.html"],
    ["merge", "wrong.yml", "out"],
    ["quantize", "bad", "out", "--format", "fp8-dynamic", "--report", "out/report.html"],
    ["dequantize", "bad", "out"],
    ["extract-lora", "bad", "worse", "out", "--report", "out/report.html"],
    ["transplant-tokenizer", "bad", "worse", "out"],
    ["statistics", "worse", "built-in", "out"],
    ["moe", "moe.yml", "out"],
    ["inspect", "adapter"],
    ["inspect", "org/name"],
]

FAILING = {"wrong.yml": 1, "moe.yml": 1, "adapter": 1, "org/name": 1}


@pytest.fixture
def bad(work: Path) -> Path:
    """Two models, all of whose strings are hostile, an adapter, and recipes of them."""
    for seed, name in enumerate(("bad", "worse")):
        rng = np.random.default_rng(seed)
        parts = ("embed_tokens", "layers.0.mlp.up_proj", f"layers.0.{HOSTILE}", "norm", HOSTILE)
        tensors = {f"model.{part}.weight": rng.standard_normal((8, 4), np.float32) for part in parts}
        folder = work / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", HOSTILE: HOSTILE})
        config: dict[str, Any] = CONFIG | {"num_hidden_layers": 1, "model_type": HOSTILE, "architectures": [HOSTILE]}
        config |= {HOSTILE: f"{name}{HOSTILE}", "_name_or_path": HOSTILE, "transformers_version": HOSTILE}
        (folder / "config.json").write_text(json.dumps(config))
        tokens = {"a": 0, HOSTILE: 1, f"{name}{HOSTILE}": 2}
        added = [{"id": 3, "content": f"{HOSTILE}{name}", "special": True}]
        tokenizer = {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": tokens, "merges": []}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": name + HOSTILE, "bos_token": HOSTILE}))
        card = {"license": HOSTILE, "base_model": [HOSTILE], "tags": [HOSTILE]}
        (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n{HOSTILE}")
    adapter = {f"base_model.model.{HOSTILE}.lora_{side}.weight": np.zeros((4, 4), np.float32) for side in "AB"}
    (work / "adapter").mkdir()
    save_file(adapter, work / "adapter" / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "base_model_name_or_path": HOSTILE, "target_modules": [HOSTILE]}
    (work / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    base = "merge_method: task_arithmetic\nbase_model: bad\nmodels:\n- {model: worse, parameters: {weight: 0.5}}\n"
    (work / "bad.yml").write_text(base)
    (work / "wrong.yml").write_text(
        f"{base}{json.dumps(HOSTILE)}: {json.dumps(HOSTILE)}\ntokenizer_source: {json.dumps(HOSTILE)}\n"
    )
    (work / "moe.yml").write_text("base_model: bad\ngate_mode: random\nexperts:\n- source_model: bad\n- source_model: worse\n")
    return work


def check(text: str, of: str) -> None:
    """No raw character that acts, and no line that begins like one of ours."""
    acting = {c for c in text if not c.isprintable() and c not in "\n\t"}
    assert not acting, (of, acting, text)
    lines = [line for line in text.split("\n") if line.lstrip().startswith((FORGED, "# Forged"))]
    assert not lines, (of, text)


def check_written(path: Path) -> None:
    """A page or a model card without markup of a model's."""
    text = path.read_text()
    check(text.split("---\n", 2)[-1], path.name)
    assert "<b>bold" not in text.replace("`", "") or path.suffix == ".md"


class Trying:
    """Runs commands; checks what they print and write, and removes what they write. printed: of the last one."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli, self.folder, self.before = cli, folder, set(folder.rglob("*"))
        self.printed = ""
        cli.monkeypatch.setenv("WEIGHTSMITH_DEBUG", "1")

    def __call__(self, *args: str, code: int = 0, keep: bool = False) -> None:
        ran = self.cli(*args)
        check(ran.out, "stdout")
        check(ran.err, "stderr")
        assert ran.code == code, ran.err
        self.printed = ran.out + ran.err
        new_paths = set(self.folder.rglob("*")) - self.before
        for path in new_paths:
            if path.suffix in (".html", ".md"):
                check_written(path)
        if keep:
            self.before |= new_paths
            return
        for path in sorted(new_paths, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_no_string_of_a_model_forges_a_line(args: list[str], bad: Path, cli: Cli) -> None:
    trying = Trying(cli, bad)
    with fake_hub.serve({}) as server:
        fake_hub.use(server, cli.monkeypatch)
        for flags in ([], ["--json"]):
            trying(*args, *flags, code=FAILING.get(args[1], int(args[0] in ("eval", "statistics"))))


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 500])
def test_no_answer_of_the_hub_forges_a_line(status: int, work: Path, cli: Cli) -> None:
    with fake_hub.serve({}) as server:
        fake_hub.use(server, cli.monkeypatch)
        cli.monkeypatch.setattr("time.sleep", lambda seconds: None)  # before what passes is asked again
        server.refusal, server.fault = HOSTILE, lambda seen: status
        cli.monkeypatch.setattr("weightsmith._files.hub._silent", {})
        trying, shown = Trying(cli, work), 0
        for args, expected in (
            (("inspect", "org/name"), 1),
            (("inspect", "org/name", "--stream"), 1),
            (("verify", "hf://org/name"), 3),
            (("merge", "linear.yml", "hf://org/out"), 3),
            (("doctor",), 0),
        ):
            cli.monkeypatch.setattr("weightsmith._files.hub._silent", {})
            trying(*args, code=expected)
            trying(*args, "--json", code=expected)
            shown += "forged" in trying.printed
    assert shown or status != 400  # whose words are shown


@pytest.mark.long
def test_no_string_of_a_gguf_file_forges_a_line(work: Path, cli: Cli) -> None:
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 8}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    keys = {f"llama.{name}": Value("u32", n) for name, n in sizes.items()}
    keys |= {"llama.attention.layer_norm_rms_epsilon": Value("f32", 1e-5), "tokenizer.ggml.model": Value("str", "llama")}
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", HOSTILE]
    keys |= {"tokenizer.ggml.tokens": Value("str", tokens), "tokenizer.ggml.eos_token_id": Value("u32", 2)}
    keys |= {"tokenizer.ggml.scores": Value("f32", [-float(i) for i in range(10)])}
    keys |= {"tokenizer.ggml.token_type": Value("i32", [2, 3, 3, 1, 1, 1, 1, 1, 1, 3])}
    keys |= {name: Value("str", HOSTILE) for name in ("general.name", HOSTILE, "tokenizer.chat_template")}
    shapes = {
        "token_embd": (10, 32),
        "output": (10, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
    }
    shapes |= {f"blk.0.{name}": (32, 32) for name in ("attn_q", "attn_output")}
    shapes |= {f"blk.0.{name}": (16, 32) for name in ("attn_k", "attn_v")}
    shapes |= {"blk.0.ffn_gate": (8, 32), "blk.0.ffn_up": (8, 32), "blk.0.ffn_down": (32, 8)}
    (work / "good.gguf").write_bytes(make_gguf(shapes, keys, "llama"))
    (work / "name.gguf").write_bytes(make_gguf(shapes | {f"blk.0.\n{FORGED}\x1b[2J": (2, 32)}, keys, "llama"))
    (work / "wrong.gguf").write_bytes(make_gguf(shapes, keys, HOSTILE))
    (work / "pre.gguf").write_bytes(make_gguf(shapes, keys | {"tokenizer.ggml.model": Value("str", HOSTILE)}, "llama"))
    (work / "merge.yml").write_text("merge_method: passthrough\nmodels:\n- model: good.gguf\n")
    trying = Trying(cli, work)
    for flags in ([], ["--json"]):
        for args in (["inspect", "good.gguf", "--stats"], ["inspect", "good.gguf", "*"], ["plan", "merge.yml"]):
            trying(*args, *flags)
        trying("dequantize", "good.gguf", "out", *flags)
        trying("diff", "good.gguf", "good.gguf", *flags)
        trying("inspect", "pre.gguf", *flags)
        for file in ("name.gguf", "wrong.gguf"):
            trying("inspect", file, *flags, code=1)
            assert "forged" in trying.printed, file


def make_gguf(shapes: dict[str, tuple[int, ...]], values: dict[str, Value], architecture: str) -> bytes:
    specs = [TensorSpec(f"{name}.weight", DTYPES["F32"], shape) for name, shape in shapes.items()]
    header = encode_metadata({"general.architecture": Value("str", architecture), **values})
    (shard,) = make_layout(specs, 10**9, header).shards
    return shard.header + bytes(shard.nbytes - len(shard.header))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that transformers loads, with hostile strings wherever it allows them; adapters, and recipes of them."""
    from tests.calibration_help import save_model

    folder = tmp_path_factory.mktemp("real")
    for seed, name in enumerate(("first", "second")):
        save_model(folder / name, seed=seed)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {HOSTILE: HOSTILE, "_name_or_path": HOSTILE}))
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": HOSTILE, HOSTILE: HOSTILE}))
        (folder / name / "README.md").write_text(f"---\n{json.dumps({'license': HOSTILE, 'tags': [HOSTILE]})}\n---\n{HOSTILE}")
    experts = [{"source_model": name, "positive_prompts": [f"{HOSTILE[:20]}{name}"]} for name in ("first", "second")]
    for mode in ("random", "hidden"):
        moe = {"base_model": "first", "gate_mode": mode, "experts": experts, "experts_per_token": 1}
        (folder / f"{mode}.yml").write_text(json.dumps(moe))
    lora = [{"model": name, "parameters": {"weight": 0.5}} for name in ("adapter", "other")]
    (folder / "adapters.yml").write_text(json.dumps({"merge_method": "linear", "models": lora}))
    applied = {"merge_method": "passthrough", "models": [{"model": "first+adapter"}]}
    (folder / "applied.yml").write_text(json.dumps(applied))
    return folder


@pytest.mark.long
def test_mixtures_and_adapters_that_succeed_forge_no_line(real: Path, cli: Cli) -> None:
    cli.monkeypatch.chdir(real)
    trying = Trying(cli, real)
    for flags in ([], ["--json"]):
        trying("moe", "random.yml", "out", *flags)
    trying("moe", "hidden.yml", "out", "--report", "out/report.html")
    trying(
        "extract-lora",
        "second",
        "first",
        "adapter",
        "--max-rank",
        "2",
        "--skip-undecomposable",
        "--report",
        "adapter/report.html",
        keep=True,
    )
    about = json.loads((real / "adapter" / "adapter_config.json").read_text())
    about |= {"base_model_name_or_path": HOSTILE, HOSTILE: None, "revision": HOSTILE}
    (real / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    trying.before |= {*shutil.copytree(real / "adapter", real / "other").rglob("*"), real / "other"}
    for args in (
        ["merge", "adapters.yml", "out"],
        ["merge", "applied.yml", "out"],
        ["inspect", "adapter"],
        ["plan", "adapters.yml"],
    ):
        for flags in ([], ["--json"]):
            trying(*args, *flags)


@pytest.mark.long
def test_names_of_outputs_and_plans_forge_no_line(bad: Path, cli: Cli) -> None:
    """Folders whose names are hostile: what is made there, verified, left unfinished, and removed."""
    name = "out" + HOSTILE.replace("/", "_")[:40]
    trying = Trying(cli, bad)
    plan = cli("plan", "bad.yml", "--json").out
    (bad / "plan.json").write_text(plan)
    (bad / "wrong.json").write_text(json.dumps({**json.loads(plan), "container": HOSTILE, HOSTILE: 1}))
    trying.before |= {bad / "plan.json", bad / "wrong.json"}
    trying("run", "wrong.json", name, code=1)
    trying("run", "plan.json", name, "--json")
    trying("run", "plan.json", name, keep=True)
    trying("run", "plan.json", name, code=3)
    trying("verify", name)
    (bad / name / f"{name}.txt").write_text("not ours")
    trying.before.add(bad / name / f"{name}.txt")
    trying("verify", name, "--json")
    trying("run", "plan.json", name, "--overwrite", code=3)
    (bad / name / f"{name}.safetensors").write_text("not ours")
    trying.before.add(bad / name / f"{name}.safetensors")
    trying("verify", name, code=4)
    trying("verify", name, "--json", code=4)
    with open_staging(bad / f"{name}2", layout(), HOSTILE) as staging:
        put(staging)
    trying.before |= set(bad.rglob("*"))
    for flags in ([], ["--json"], ["--yes"]):
        trying("clean", ".", *flags)
        assert "forged" in trying.printed
    assert not staging_folder(bad / f"{name}2").exists()


def test_a_name_becomes_no_markup() -> None:
    shown = markdown(HOSTILE)
    assert shown.startswith("`` x")
    assert shown.endswith(" ``")
    check(shown, "markdown")
    assert code("a`b``c") == "``` a`b``c ```"
    assert [markdown(name) for name in ("mlp.up_proj", "'word'", "-1.5", "http://x", "www.x.org", "a*b*")] == [
        *("mlp.up_proj", "'word'", "-1.5"),
        *("`http://x`", "`www.x.org`", "`a*b*`"),
    ]


def test_every_exit_escapes() -> None:
    check(str(Finding(HOSTILE, HOSTILE, (HOSTILE,), HOSTILE)), "a finding")
    check("\n".join(table((HOSTILE,), [(HOSTILE,)])), "a table")
    written = json_text({HOSTILE: [HOSTILE, "\udc80", "\U000e0001é"]})
    check(written, "JSON")
    assert json.loads(written) == {HOSTILE: [HOSTILE, "\udc80", "\U000e0001é"]}
