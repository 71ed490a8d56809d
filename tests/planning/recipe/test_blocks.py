"""Values for the blocks of diffusion models: names, lists, and which tensors each block has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import plan_help
from tests.plan_help import plan, warnings
from weightsmith._base.errors import ParameterError, UnknownName
from weightsmith._methods import all_methods
from weightsmith._planning.recipe.blocks import ROOTS, TABLES
from weightsmith._planning.recipe.grammar import schema

PLACES = {
    "sd1": {
        "model.diffusion_model.time_embed.0.weight": "IN00",
        "model.diffusion_model.input_blocks.0.0.weight": "IN00",
        "model.diffusion_model.input_blocks.1.0.in_layers.2.weight": "IN01",
        "model.diffusion_model.input_blocks.11.0.in_layers.2.weight": "IN11",
        "model.diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_out.0.weight": "M00",
        "model.diffusion_model.output_blocks.3.1.proj_out.weight": "OUT03",
        "model.diffusion_model.out.2.weight": "OUT11",
        "first_stage_model.decoder.mid.block_1.conv1.weight": "BASE",
        "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight": "BASE",
        "unet/down_blocks.0.attentions.0.proj_in.weight": "IN01",
        "unet/down_blocks.0.downsamplers.0.conv.weight": "IN03",
        "unet/down_blocks.3.resnets.1.conv1.weight": "IN11",
        "unet/up_blocks.0.resnets.2.conv1.weight": "OUT02",
        "unet/up_blocks.3.attentions.2.proj_in.weight": "OUT11",
        "unet/conv_norm_out.weight": "OUT11",
        "vae/decoder.conv_in.weight": "BASE",
        "vae/encoder.mid_block.attentions.0.to_q.weight": "BASE",
    },
    "sdxl": {
        "model.diffusion_model.label_emb.0.0.weight": "IN00",
        "model.diffusion_model.input_blocks.8.1.norm.weight": "IN08",
        "model.diffusion_model.output_blocks.8.0.in_layers.2.weight": "OUT08",
        "model.diffusion_model.out.0.weight": "OUT08",
        "conditioner.embedders.1.model.ln_final.weight": "BASE",
        "unet/add_embedding.linear_1.weight": "IN00",
        "unet/mid_block.resnets.1.conv1.weight": "M00",
        "unet/up_blocks.1.upsamplers.0.conv.weight": "OUT05",
        "out.0.weight": "OUT08",
    },
    "flux": {
        "model.diffusion_model.double_blocks.1.img_attn.proj.weight": "D01",
        "double_blocks.18.img_attn.proj.weight": "D18",
        "single_blocks.3.linear1.weight": "S03",
        "transformer/single_transformer_blocks.37.proj_mlp.weight": "S37",
        "transformer/transformer_blocks.1.attn.to_q.weight": "D01",
        "transformer/time_text_embed.timestep_embedder.linear_1.weight": "IN",
        "guidance_in.in_layer.weight": "IN",
        "final_layer.linear.weight": "OUT",
        "text_encoders.t5xxl.transformer.shared.weight": "T5",
        "text_encoder/text_model.final_layer_norm.weight": "CLIP",
        "vae.decoder.conv_in.weight": "BASE",
    },
    "sd3": {
        "model.diffusion_model.joint_blocks.3.x_block.attn.qkv.weight": "joint_blocks.3",
        "transformer/norm_out.linear.weight": "final_layer",
        "transformer/proj_out.weight": "final_layer",
        "model.diffusion_model.pos_embed": "pos_embed",
        "transformer/pos_embed.proj.weight": "pos_embed",
        "model.diffusion_model.t_embedder.mlp.0.weight": "t_embedder",
        "transformer/time_text_embed.timestep_embedder.linear_1.weight": "t_embedder",
        "transformer/time_text_embed.text_embedder.linear_1.weight": "y_embedder",
    },
    "wan": {
        "blocks.12.self_attn.q.weight": "blocks.12",
        "transformer/blocks.1.attn1.to_q.weight": "blocks.1",
        "head.head.weight": "head",
        "head.modulation": "head",
        "transformer/proj_out.weight": "head",
        "transformer_2/scale_shift_table": "head",
        "transformer_2/blocks.39.attn1.to_q.weight": "blocks.39",
        "transformer/condition_embedder.time_embedder.linear_1.weight": "time_embedding",
        "transformer/condition_embedder.time_proj.weight": "time_projection",
        "transformer/condition_embedder.text_embedder.linear_1.weight": "text_embedding",
        "transformer_2/condition_embedder.image_embedder.ff.net.0.proj.weight": "img_emb",
    },
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in PLACES.items() for name in names])
def test_the_block_of_a_tensor(family: str, name: str) -> None:
    """Compared with `blockfromkey` of SuperMerger 2024-12 for all tensors of sd1, sdxl and Flux: none differs."""
    table = TABLES[family]
    fitting = [block for block in table.blocks if f"{name}.".startswith(table.starts(block) or ())]
    assert fitting == [block for block in [PLACES[family][name]] if block != "BASE"]


def test_the_numbers_of_values_in_lists() -> None:
    assert {family: len(table.order) for family, table in TABLES.items()} == {
        "sd1": 26,
        "sdxl": 20,
        "flux": 61,
        "sd3": 0,
        "wan": 0,
    }
    assert len(ROOTS) == len(set(ROOTS))


def file_of(path: Path, seed: int, family: str = "sdxl") -> str:
    random = np.random.default_rng(seed)
    save_file({name: random.standard_normal((3, 4)).astype(np.float32) for name in PLACES[family]}, path)
    return str(path)


def merge(tmp_path: Path, weight: Any, family: str = "sdxl") -> dict[str, float]:
    """The weight of the other model in each tensor of a task_arithmetic merge."""
    a, b = file_of(tmp_path / "a.safetensors", 1, family), file_of(tmp_path / "b.safetensors", 2, family)
    recipe = {"merge_method": "task_arithmetic", "base_model": a, "models": [{"model": b, "parameters": {"weight": weight}}]}
    out = load_file(weightsmith.merge(recipe, tmp_path / "out", fsync=False).out / "model.safetensors")
    first, second = load_file(a), load_file(b)
    return {name: round(float(((out[name] - first[name]) / (second[name] - first[name])).mean()), 3) for name in out}


SDXL = [0.01 * n for n in range(20)]


@pytest.mark.parametrize("values", [SDXL, ", ".join(map(str, SDXL))], ids=["list", "text"])
def test_a_list_in_the_order_of_the_blocks(values: Any, tmp_path: Path) -> None:
    order = TABLES["sdxl"].order
    by_name = merge(tmp_path, {"blocks": "sdxl", "values": values})
    assert by_name == {name: round(0.01 * order.index(block), 3) for name, block in PLACES["sdxl"].items()}


def test_names_ranges_and_names_of_comfyui(tmp_path: Path) -> None:
    values = {"BASE": 0.9, "IN00-IN08": 0.2, "output_blocks.8": 0.4, "OUT00-OUT08": 0.3}
    by_name = merge(tmp_path, {"blocks": "sdxl", "values": {**values, "M00": 0.5}})
    assert {name.rpartition("/")[2]: value for name, value in by_name.items()} == {
        "model.diffusion_model.label_emb.0.0.weight": 0.2,
        "model.diffusion_model.input_blocks.8.1.norm.weight": 0.2,
        "model.diffusion_model.output_blocks.8.0.in_layers.2.weight": 0.4,
        "model.diffusion_model.out.0.weight": 0.3,
        "conditioner.embedders.1.model.ln_final.weight": 0.9,
        "add_embedding.linear_1.weight": 0.2,
        "mid_block.resnets.1.conv1.weight": 0.5,
        "up_blocks.1.upsamplers.0.conv.weight": 0.3,
        "out.0.weight": 0.3,
    }


def test_blocks_stand_beside_filters(tmp_path: Path) -> None:
    weight = [{"filter": "attn.proj", "value": 0.7}, {"blocks": "flux", "values": {"D00-D18": 0.1}}, {"value": 0.5}]
    by_name = merge(tmp_path, weight, "flux")
    assert by_name["model.diffusion_model.double_blocks.1.img_attn.proj.weight"] == 0.7
    assert by_name["transformer/transformer_blocks.1.attn.to_q.weight"] == 0.1
    assert by_name["single_blocks.3.linear1.weight"] == 0.5


def test_each_part_of_stable_diffusion_3_and_wan(tmp_path: Path) -> None:
    values = {
        "pos_embed": 0.1,
        "time_text_embed": 0.2,
        "y_embedder": 0.6,
        "t_embedder": 0.3,
        "joint_blocks.0-joint_blocks.37": 0.4,
    }
    by_name = merge(tmp_path, {"blocks": "sd3", "values": {**values, "final_layer": 0.5}}, "sd3")
    assert by_name["model.diffusion_model.pos_embed"] == 0.1
    assert by_name["transformer/time_text_embed.text_embedder.linear_1.weight"] == 0.2
    assert by_name["model.diffusion_model.t_embedder.mlp.0.weight"] == 0.3
    assert by_name["model.diffusion_model.joint_blocks.3.x_block.attn.qkv.weight"] == 0.4
    assert by_name["transformer/proj_out.weight"] == 0.5
    (tmp_path / "wan").mkdir()
    by_name = merge(tmp_path / "wan", {"blocks": "wan", "values": {"blocks.0-blocks.39": 0.3, "BASE": 0.1}}, "wan")
    assert by_name["transformer_2/blocks.39.attn1.to_q.weight"] == 0.3


def test_a_range_of_which_the_model_has_some_blocks_is_no_warning(tmp_path: Path) -> None:
    a, b = file_of(tmp_path / "a.safetensors", 1), file_of(tmp_path / "b.safetensors", 2)

    def of(values: dict[str, float]) -> list[str]:
        weight = {"blocks": "sdxl", "values": {**values, "BASE": 0.5}}
        models = [{"model": b, "parameters": {"weight": weight}}]
        texts = warnings(plan({"merge_method": "task_arithmetic", "base_model": a, "models": models}))
        return [text for text in texts if "the filter" in text]

    assert not of({"IN00-IN08": 0.1})
    (text,) = of({"IN01-IN03": 0.1})
    assert "the filter 'IN01-IN03' of weight decides for no tensor" in text


def test_a_block_that_the_model_lacks_is_a_warning(tmp_path: Path) -> None:
    a, b = file_of(tmp_path / "a.safetensors", 1), file_of(tmp_path / "b.safetensors", 2)
    weight = {"blocks": "sdxl", "values": {"IN03": 0.1, "BASE": 0.5}}
    p = plan({"merge_method": "task_arithmetic", "base_model": a, "models": [{"model": b, "parameters": {"weight": weight}}]})
    assert any("the filter 'IN03' of weight decides for no tensor" in text for text in warnings(p))


@pytest.mark.parametrize(
    ("weight", "kind", "text"),
    [
        ({"blocks": "sdxl", "values": [0.1] * 26}, ParameterError, "26 values, and the list of Stable Diffusion XL has 20"),
        ({"blocks": "sd1", "values": "0.1,0.2"}, ParameterError, "2 values, and the list of Stable Diffusion 1 and 2 has 26"),
        (
            {"blocks": "wan", "values": [0.1] * 40},
            ParameterError,
            "several numbers of blocks, so a list of 40 values is ambiguous",
        ),
        ({"blocks": "sdxl", "values": {"IN09": 1}}, UnknownName, "Stable Diffusion XL has no block 'IN09' (did you mean 'IN0"),
        ({"blocks": "sdxl", "values": {"IN05-IN02": 1}}, UnknownName, "no block 'IN05-IN02'"),
        ({"blocks": "sdx", "values": [1]}, UnknownName, "(did you mean 'sdxl'?)"),
        ({"blocks": "sdxl", "values": "much"}, ParameterError, "a list of numbers, or block names with numbers"),
        ({"blocks": "sdxl", "values": {"IN01": [1, 2]}}, ParameterError, "the block 'IN01' takes a number"),
        ({"blocks": "sdxl", "values": {"IN01": "much", "BASE": 1}}, ParameterError, "weight"),
        ({"blocks": "sdxl"}, Exception, "values"),
    ],
)
def test_wrong_values_are_one_error(weight: Any, kind: type, text: str, tmp_path: Path) -> None:
    a, b = file_of(tmp_path / "a.safetensors", 1), file_of(tmp_path / "b.safetensors", 2)
    recipe = {"merge_method": "task_arithmetic", "base_model": a, "models": [{"model": b, "parameters": {"weight": weight}}]}
    (problem,) = plan_help.problems(recipe)
    assert isinstance(problem, kind)
    assert text in str(problem)


@pytest.mark.long
def test_the_schema_accepts_blocks() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for weight in ({"blocks": "sdxl", "values": SDXL}, [{"blocks": "flux", "values": {"D00": 1}}, {"value": 0.5}]):
        recipe = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": weight}}]}
        jsonschema.validate(recipe, schema(all_methods()))
