"""Whatever strings a model holds: no command lets them forge a line, paint over the terminal, or become markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import fake_hub
from tests.cli_help import CONFIG, Cli, cli, work
from weightsmith.errors import Finding
from weightsmith.text import code, json_text, markdown, table

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
    ["merge", "bad.yml", "out", "--report"],
    ["merge", "wrong.yml", "out"],
    ["quantize", "bad", "out", "--format", "fp8-dynamic", "--report"],
    ["dequantize", "bad", "out"],
    ["extract-lora", "bad", "worse", "out", "--report"],
    ["transplant-tokenizer", "bad", "worse", "out"],
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


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_no_string_of_a_model_forges_a_line(args: list[str], bad: Path, cli: Cli) -> None:
    before = set(bad.rglob("*"))
    cli.monkeypatch.setenv("WEIGHTSMITH_DEBUG", "1")
    with fake_hub.serve({}) as server:
        fake_hub.use(server, cli.monkeypatch)
        for more in ([], ["--json"]):
            ran = cli(*args, *more)
            check(ran.out, "stdout")
            check(ran.err, "stderr")
            assert ran.code == FAILING.get(args[1], 0), ran.err
            for path in sorted(set(bad.rglob("*")) - before):
                if path.suffix in (".html", ".md"):
                    text = path.read_text()
                    check(text.split("---\n", 2)[-1], path.name)
                    assert "<b>bold" not in text.replace("`", "") or path.suffix == ".md"
            for path in sorted(set(bad.rglob("*")) - before, reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()


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
