"""What a model seems to lack: said of models that lack it, and of no whole one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests.mini import write_checkpoint
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.structure import analyse
from weightsmith._models.structure.incomplete import seems_to_lack

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 5,
    "tie_word_embeddings": False,
}
INNER = ("input_layernorm", "self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = [f"model.layers.{i}.{part}.weight" for i in range(5) for part in INNER]
NAMES = ["model.embed_tokens.weight", *LAYERS, "model.norm.weight", "lm_head.weight"]


def lacks(names: Iterable[str], config: dict[str, Any]) -> list[str]:
    specs = [TensorSpec(name, DTYPES["BF16"], (4, 4)) for name in names]
    return list(seems_to_lack(analyse(specs, config), [spec.name for spec in specs], config))


def without(*beginnings: str) -> list[str]:
    return [name for name in NAMES if not name.startswith(beginnings)]


def test_a_whole_model_lacks_nothing() -> None:
    assert lacks(NAMES, CONFIG) == []
    assert lacks(without("lm_head"), CONFIG | {"tie_word_embeddings": True}) == []


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("model.layers.2.mlp.up_proj", ["model.layers.2.mlp.up_proj.weight, which 4 other layers have"]),
        ("model.layers.1.", ["layer 1 under model.layers., of 5"]),
        ("model.layers.4.", ["layer 4 under model.layers.: config.json counts 5 layers"]),
        ("model.norm", ["norm behind its last layer"]),
        ("model.embed", ["embedding of its tokens"]),
        ("lm_head", ["head (lm_head), and tie_word_embeddings is false"]),
    ],
)
def test_what_is_missing_is_named(missing: str, says: list[str]) -> None:
    assert lacks(without(missing), CONFIG) == says


def test_the_last_shard() -> None:
    names = [name for name in NAMES[: NAMES.index("model.layers.3.mlp.up_proj.weight")]]
    assert lacks(names, CONFIG) == [
        "layer 4 under model.layers.: config.json counts 5 layers",
        "norm behind its last layer",
        "head (lm_head), and tie_word_embeddings is false",
    ]


def test_layers_of_several_kinds_differ_by_design() -> None:
    experts = [f"mlp.experts.{k}.up_proj" for k in range(3)]
    dense_first = [f"model.layers.{i}.{part}.weight" for i in range(6) for part in (["mlp.up_proj"] if i < 1 else experts)]
    assert lacks(dense_first, {"num_hidden_layers": 6}) == []
    damaged = [name for name in dense_first if name != "model.layers.3.mlp.experts.1.up_proj.weight"]
    assert lacks(damaged, {"num_hidden_layers": 6}) == [
        "model.layers.3.mlp.experts.1.up_proj.weight, which 4 other layers have"
    ]
    no_first_norm = [name for name in NAMES if name != "model.layers.0.input_layernorm.weight"]  # ModernBERT's
    assert lacks(no_first_norm, CONFIG) == []
    pruned = without("model.layers.2.self_attn")
    assert lacks(pruned, CONFIG | {"block_configs": [{}] * 5}) == []


def test_a_module_of_the_last_layer_alone() -> None:
    assert lacks(without("model.layers.4.mlp.up_proj"), CONFIG) == [
        "model.layers.4.mlp.up_proj.weight, which 4 other layers have"
    ]
    by_design = without("model.layers.4.mlp")  # the last block of SD3 has no part for the text behind its attention
    assert lacks(by_design, CONFIG) == []
    tower = [f"vision_tower.layers.{i}.{part}" for i in range(5) for part in INNER][:-1]  # whose last norm nobody reads
    assert lacks(tower, {"vision_config": {"num_hidden_layers": 5}}) == []


def layers_without(missing: Mapping[int, str], n_layers: int = 32) -> list[str]:
    names = [f"model.layers.{i}.{part}.weight" for i in range(n_layers) for part in INNER]
    return [name for name in names if name not in {f"model.layers.{i}.{part}.weight" for i, part in missing.items()}]


def test_the_same_tensor_of_two_layers_of_many() -> None:
    config: dict[str, Any] = {"num_hidden_layers": 32}
    for places in ((4, 13), (9, 10), (13, 31)):
        assert lacks(layers_without(dict.fromkeys(places, "mlp.up_proj")), config) == [
            f"model.layers.{i}.mlp.up_proj.weight, which 30 other layers have" for i in places
        ]
    assert len(lacks(layers_without(dict.fromkeys((4, 13, 20), "mlp.up_proj")), config)) == 3


@pytest.mark.parametrize(
    ("places", "stated"),
    [
        ((0, 1), {}),
        ((30, 31), {}),
        ((0, 31), {}),
        ((7, 15, 23, 31), {}),
        ((4, 13), {"layer_types": ["full" if i in (4, 13) else "sliding" for i in range(32)]}),
        ((4, 13), {"no_rope_layers": [4, 13]}),
        ((2, 4, 6, 13, 20), {}),
    ],
    ids=["first", "last", "ends", "every eighth", "kinds", "numbers", "many"],
)
def test_layers_without_a_tensor_by_design(places: tuple[int, ...], stated: dict[str, Any]) -> None:
    """By their position, or by what config.json says of them; and if they are many, they are a kind of their own."""
    assert lacks(layers_without(dict.fromkeys(places, "mlp.up_proj")), {"num_hidden_layers": 32, **stated}) == []


def test_two_layers_of_a_kind_that_config_json_states() -> None:
    """A layer of another kind elsewhere does not hide that these lack what others of their kind have."""
    kinds = ["full" if i % 6 == 5 else "sliding" for i in range(32)]
    norms = [f"model.layers.{i}.self_attn.q_norm.weight" for i in range(32) if kinds[i] == "full"]
    damaged = [*layers_without({4: "mlp.up_proj", 13: "mlp.up_proj"}), *norms]
    assert [line.split(",")[0] for line in lacks(damaged, {"num_hidden_layers": 32, "layer_types": kinds})] == [
        "model.layers.4.mlp.up_proj.weight",
        "model.layers.13.mlp.up_proj.weight",
    ]


def test_blocks_of_convolutions_have_numbers_without_tensors() -> None:
    names = [f"model.decoder.block.{i}.conv.{part}" for i in (1, 3) for part in ("weight", "bias")]
    assert lacks(names, {"num_hidden_layers": 4}) == []


def test_two_layers() -> None:
    names = [f"model.layers.{i}.{part}.weight" for i in range(8) if i not in (2, 3) for part in INNER]
    assert lacks(names, {"num_hidden_layers": 8}) == [f"layer {i} under model.layers., of 8" for i in (2, 3)]


def test_a_layer_may_have_fewer_experts() -> None:
    names = [f"model.layers.{i}.experts.{k}.up" for i in range(6) for k in range(2 if i == 2 else 4)]
    assert lacks(names, {"num_hidden_layers": 6}) == []
    assert lacks([name for name in names if name != "model.layers.3.experts.1.up"], {"num_hidden_layers": 6}) == [
        "model.layers.3.experts.1.up, which 5 other layers have"
    ]


def test_models_that_have_no_head_by_design() -> None:
    embedding = [name.removeprefix("model.") for name in without("lm_head")]
    assert lacks(embedding, CONFIG) == []
    draft = [*(f"model.layers.0.{part}.weight" for part in INNER), "model.embed_tokens.weight", "model.fc.weight"]
    assert lacks(draft, CONFIG | {"num_hidden_layers": 1}) == []


def test_layers_of_many_kinds_are_not_compared() -> None:
    """To compare each with each would take the square of their number."""
    names = [f"model.layers.{i}.{part}.weight" for i in range(2000) for part in ("up", f"only{i // 3}", *"a"[: i % 3])]
    assert lacks(names, {"num_hidden_layers": 2000}) == []


def test_commands_on_one_model_warn(tmp_path: Path) -> None:
    tensors = {name: np.ones((4, 4), np.float32) for name in without("model.layers.2.mlp.up_proj", "model.norm")}
    model = write_checkpoint(tmp_path / "m", tensors, CONFIG)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}]}
    for plan in (weightsmith.plan(recipe), weightsmith.plan(recipe, quantize="fp8-dynamic")):
        (warning,) = [warning for warning in plan.warnings if "the model has no" in warning.what]
        assert warning.what == "the model has no model.layers.2.mlp.up_proj.weight, which 4 other layers have (1 more)"
        assert warning.where == str(model)
        assert warning.details[1] == "norm behind its last layer"


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_no_model_of_transformers_seems_to_lack_anything() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto as auto

    transformers.utils.logging.set_verbosity_error()
    said, built = dict[str, list[str]](), 0
    for model_type, name in (
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(),
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items(),
    ):
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
            with torch.device("meta"):
                model = getattr(transformers, name)._from_config(config)
        except Exception:  # whatever a config's defaults break on
            continue
        built += 1
        stored = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
        said[name] = lacks(
            reversed(stored.values()), json.loads(config.to_json_string(use_diff=False)) | {"architectures": [name]}
        )
    assert built > 100
    assert {model_type: missing for model_type, missing in said.items() if missing} == {}
