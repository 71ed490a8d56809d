"""Mamba, Falcon Mamba and Mamba 2: models without attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._models.formats.gguf.architectures.mamba import FalconMamba, Mamba, Mamba2
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture
from weightsmith._models.formats.gguf.base.mamba import INNER
from weightsmith._models.formats.gguf.header import read_gguf_header


def saved(name: str, folder: Path, seed: int = 1, **changes: Any) -> Path:
    source = zoo.save(name, folder, seed, **{"vocab_size": 262, **changes})
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (source / file).write_bytes(content)
    return source


def quantize(source: Path, out: Path, name: str = "f32") -> Path:
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False)
    return out / "model.gguf"


def test_keys_are_those_of_llama_cpps_converter(tmp_path: Path) -> None:
    keys = read_gguf_header(quantize(saved("mamba", tmp_path / "m"), tmp_path / "q")).keys
    own = {name.removeprefix("mamba."): value for name, value in keys.items() if name.startswith("mamba.")}
    assert own.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert own == {
        **{"block_count": 2, "embedding_length": 32, "context_length": 1 << 20, "feed_forward_length": 0},
        **{"attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.state_size": 4, "ssm.inner_size": 64},
        **{"ssm.time_step_rank": 2, "ssm.dt_b_c_rms": False},
    }


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_merge_straight_to_gguf_is_the_merge_then_quantised(name: str, tmp_path: Path) -> None:
    folders = [str(saved(name, tmp_path / model, seed)) for seed, model in enumerate("ab")]
    models = [{"model": folder, "parameters": {"weight": 0.5}} for folder in folders]
    recipe = {"merge_method": "linear", "models": models, "dtype": "bfloat16"}
    weightsmith.merge(recipe, tmp_path / "merged", progress=False)
    weightsmith.merge(recipe, tmp_path / "once", quantize="gguf-q8_0", progress=False)
    assert stored(tmp_path / "once" / "model.gguf") == stored(quantize(tmp_path / "merged", tmp_path / "q", "q8_0"))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mamba", {"expand": 3}, "expand is 3, and llama.cpp takes 2 for granted"),
        ("mamba", {"intermediate_size": 48}, "intermediate_size is 48, and llama.cpp takes 64"),
        ("mamba", {"use_bias": True}, "use_bias is True"),
        ("mamba", {"use_conv_bias": False}, "use_conv_bias is False"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp takes 'silu'"),
        ("mamba", {"time_step_rank": 3}, "dt_proj.weight: time_step_rank is 3 in config.json"),
        ("mamba", {"state_size": 5}, r"x_proj.weight: time_step_rank \+ 2 \* state_size is 12"),
        ("mamba2", {"num_heads": 2}, r"num_heads \* head_dim is 32, and llama.cpp takes 64"),
        ("mamba2", {"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\]"),
        ("mamba2", {"n_groups": 1}, r"in_proj.weight: 2 \* expand \* hidden_size \+ 2 \* n_groups \* state_size"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "m")
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


GOOD = {
    **{"block_count": 2, "embedding_length": 32, "attention.layer_norm_rms_epsilon": 1e-5, "ssm.conv_kernel": 4},
    **{"ssm.state_size": 4, "ssm.time_step_rank": 4, INNER: 64, "ssm.group_count": 2},
}


def read(architecture: GgufArchitecture, **changes: object) -> dict[str, Any]:
    keys = {f"{architecture.name}.{name}": value for name, value in {**GOOD, **changes}.items()}
    return architecture.config(keys, Contents({"token_embd.weight": (8, 32)}), "float32", "here")


def test_config_json_of_a_file() -> None:
    config = read(Mamba())
    assert (config["expand"], config["time_step_rank"], config["tie_word_embeddings"]) == (2, 4, True)
    assert not {"num_attention_heads", "head_dim"}.intersection(config)
    config = read(Mamba2())
    assert (config["num_heads"], config["head_dim"], config["n_groups"]) == (4, 16, 2)
    assert "time_step_rank" not in config
    for normed in (False, True):
        values = Mamba().values({"mamba.ssm.dt_b_c_rms": normed}, "here")
        assert (Mamba().owns(values), FalconMamba().owns(values)) == (not normed, normed)


def test_widths_that_are_no_multiples() -> None:
    with pytest.raises(FormatError, match="is 65, not a multiple of 32, the width of the model"):
        read(Mamba(), **{INNER: 65})
    with pytest.raises(FormatError, match="is 64, not a multiple of 3 heads"):
        read(Mamba2(), **{"ssm.time_step_rank": 3})
