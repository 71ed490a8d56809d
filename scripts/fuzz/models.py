"""Checkpoints: config.json, safetensors, their index, pickles of torch, settings of tokenizers."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import LINEAR, Kind, Rng, merge
from scripts.fuzz.mutators import CONFIG_WORDS, mutate_bytes, mutate_json, mutate_safetensors


def mutate_pytorch(rng: Rng, data: bytes) -> bytes:
    """Another pickle in the same archive, or another archive around the same pickle."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, data)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("/data.pkl"):
                content = _mutate_pickle(rng, content)
            elif rng.random() < 0.1:
                content = mutate_bytes(rng, content)
            new.writestr(zipfile.ZipInfo(info.filename), content)
    return out.getvalue()


def _mutate_pickle(rng: Rng, data: bytes) -> bytes:
    """Numbers of the pickle changed in place, instructions doubled, pieces put elsewhere."""
    choice = rng.random()
    if choice < 0.02:
        return b"\x80\x02" + rng.choice((b"]", b"}", b"(", b"N", b"K\x01", b"]q\0h\0", b"NN\x86")) * 1_000_000 + b"."
    if choice < 0.5:
        return mutate_bytes(rng, data)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
        piece = changed[at : min(end, at + 60)]
        place = rng.randrange(len(changed) + 1)
        new = rng.choice(
            (
                piece,
                b"J\xff\xff\xff\xff",
                b"J\xff\xff\xff\x7f",
                b"\x8a\x08" + b"\xff" * 8,
                b"N",
                b"]",
                b")",
                b"t",
                b"R",
                b"(",
                b"2",
            )
        )
        changed[place : place + rng.choice((0, 0, 1, len(new)))] = new
    return bytes(changed)


def make_models(*, layers: int = 3) -> None:
    """`a` and `b`, dense; `x` with experts, `q` with FP8 weights; `lora`, an adapter of a."""
    import ml_dtypes
    import numpy as np

    from tests.mini import write_checkpoint

    rng = np.random.default_rng(0)

    def tensors(inside: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        shapes = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
        shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in inside.items()}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    common = {
        **{"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16, "rope_theta": 10000.0},
        **{"num_hidden_layers": layers, "intermediate_size": 12, "head_dim": 4, "tie_word_embeddings": False},
        **{"dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": [1, 2]},
        **{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8},
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    }
    attention = {
        **{f"{norm}_layernorm.weight": (8,) for norm in ("input", "post_attention")},
        **{"self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8), "self_attn.v_proj.weight": (4, 8)},
        "self_attn.o_proj.weight": (8, 8),
    }
    dense = {**attention, "mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8), "mlp.down_proj.weight": (8, 12)}
    experts = {"block_sparse_moe.gate.weight": (4, 8)}
    for e in range(4):
        experts |= {
            f"block_sparse_moe.experts.{e}.{w}.weight": s for w, s in (("w1", (12, 8)), ("w2", (8, 12)), ("w3", (12, 8)))
        }
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common}
    for name in "ab":
        write_checkpoint(Path(name), tensors(dense), llama)
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    write_checkpoint(Path("x"), tensors({**attention, **experts}), {**mixtral, **common})
    quantised = tensors(dense)
    for name in [n for n in quantised if ".mlp." in n]:
        quantised[name] = quantised[name].astype(ml_dtypes.float8_e4m3fn)
        quantised[name + "_scale_inv"] = np.ones((1, 1), np.float32)
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
    write_checkpoint(Path("q"), quantised, {**llama, **fp8})
    factors = {}
    for module, (rows, cols) in {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.1.mlp.down_proj": (8, 12)}.items():
        factors[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((4, cols)).astype(np.float32)
        factors[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((rows, 4)).astype(np.float32)
    write_checkpoint(Path("lora"), factors)
    Path("lora/model.safetensors").rename("lora/adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "use_rslora": False}
    patterns = {"rank_pattern": {r"^model\.layers\.[0-9]+\.self_attn\.(q|k)_proj": 4, "down_proj": 4}}
    adapter |= {
        **patterns,
        "alpha_pattern": {"layers.0.*q_proj": 2.5},
        "base_model_name_or_path": "a",
        "init_lora_weights": True,
    }
    Path("lora/adapter_config.json").write_text(json.dumps(adapter))
    Path("a/tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "n": [1]})
    )
    Path("a/tokenization_x.py").write_text("from .helper import y\nfrom . import z, w\n")
    Path("a/helper.py").write_text("")


def _use_config(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith
    from tests.plan_help import prepare_moe
    from weightsmith._features.mixture import layouts
    from weightsmith._planning.options import RecipeOptions

    def moe(recipe: dict[str, Any]) -> None:
        prepare_moe(recipe, RecipeOptions()).close()

    name = file[0]
    other = name if name in "xq" else "b"
    both = {"merge_method": "linear", "models": [{"model": n, "parameters": {"weight": 0.5}} for n in (name, other)]}
    stack = [
        {"sources": [{"model": name, "layer_range": r}]}
        for r in rng.choice(([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[2, 3], [0, 3]]))
    ]
    yield lambda: weightsmith.plan(both)
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "slices": stack})
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{name}+lora"}]})
    layout = rng.choice(layouts.NAMES)
    shared = {"shared_experts": [{"source_model": name, "residual_scale": 0.1}]} if rng.random() < 0.5 else {}
    experts = [{"source_model": n} for n in (name, other)]
    yield lambda: moe({"base_model": name, "experts": experts, "gate_mode": "random", "architecture": layout, **shared})
    yield lambda: moe({"base_model": name, "experts": experts, "gate_mode": "random"})
    yield lambda: moe({"model": name, "prune_experts": {"keep": [0, 2]}})
    if rng.random() < 0.2:
        yield lambda: merge(both)
        yield lambda: merge(both, quantize="fp8-dynamic")


def use_checkpoint(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    def read() -> None:
        from weightsmith import open_checkpoint

        with open_checkpoint(Path(file).parent) as checkpoint:
            for name in checkpoint.specs:
                checkpoint.read(name)

    yield read
    if rng.random() < 0.2:
        yield lambda: merge(LINEAR)


def _make_index() -> None:
    from tests.mini import write_checkpoint
    from weightsmith import open_checkpoint

    make_models()
    with open_checkpoint("a") as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.specs}
        config = checkpoint.config
    shutil.rmtree("a")
    write_checkpoint(Path("a"), tensors, config, max_shard_bytes=1500)


def _make_pytorch() -> None:
    import torch

    make_models()
    weights = {f"model.layers.{i}.w.weight": torch.arange(12.0).reshape(3, 4).t() for i in range(2)}
    weights |= {"half": torch.ones(3, dtype=torch.float16), "view": weights["model.layers.0.w.weight"][1:]}
    Path("p").mkdir()
    torch.save(weights, "p/pytorch_model.bin")
    Path("p/config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')


def _make_megatron() -> None:
    """What two slices of two stages save."""
    import argparse

    import torch

    make_models()
    for rank in range(2):
        for stage in range(2):
            layer = {"linear_qkv.weight": torch.ones(4, 3), "linear_fc1.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)}
            tensors = {f"decoder.layers.0.{name}": a for name, a in {**layer, "linear_fc2.weight": torch.ones(3, 2)}.items()}
            ends = "embedding.word_embeddings.weight" if stage == 0 else "output_layer.weight"
            args = argparse.Namespace(num_layers=2, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
            folder = Path(f"p/mp_rank_{rank:02d}_{stage:03d}")
            folder.mkdir(parents=True, exist_ok=True)
            whole = {"args": args, "checkpoint_version": 3.0, "model": {**tensors, ends: torch.ones(4, 3)}}
            torch.save(whole, folder / "model_optim_rng.pt")
    Path("p/config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')


def _make_distributed() -> None:
    """What one process saves, with parts of `w` as if two had: by hand, in a second table."""
    import pickle

    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import MetadataIndex

    make_models()
    w = torch.arange(12.0).reshape(4, 3)
    state = {"model": {"w": w[:2], "rest": w[2:], "half": torch.ones(3).half()}, "optimizer": {"step": torch.ones(())}}
    checkpoint.save(state, checkpoint_id="p", no_dist=True)
    metadata = pickle.loads(Path("p/.metadata").read_bytes())  # written a line above
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    part = tensors.pop("model.rest").chunks[0]
    places[MetadataIndex("model.w", [2, 0])] = places.pop(MetadataIndex("model.rest", [0, 0]))
    part.offsets = torch.Size([2, 0])
    tensors["model.w"].size = torch.Size([4, 3])
    tensors["model.w"].chunks.append(part)
    Path("p/.metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    Path("p/config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')


def _make_zero() -> None:
    import torch

    make_models()
    Path("p").mkdir()
    for rank in range(2):
        shapes = [{"w": torch.Size([3, 3]), "norm": torch.Size([3])}]
        model = {"param_shapes": shapes, "buffer_names": ["b"], "module": {"b": torch.ones(2)}, "shared_params": {"head": "w"}}
        frozen = {"frozen_param_shapes": {"f": torch.Size([3])}, "frozen_param_fragments": {"f": torch.ones(2)}}
        torch.save({**model, **frozen}, f"p/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.ones(4), torch.ones(3)]}
        torch.save({"optimizer_state_dict": state}, f"p/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    Path("p/config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')


KINDS = {
    "config": Kind(
        make_models,
        ("a/config.json", "x/config.json", "q/config.json"),
        lambda rng, data: mutate_json(rng, data, CONFIG_WORDS),
        _use_config,
    ),
    "safetensors": Kind(make_models, ("a/model.safetensors", "q/model.safetensors"), mutate_safetensors, use_checkpoint),
    "index": Kind(
        _make_index,
        ("a/model.safetensors.index.json",),
        lambda rng, data: mutate_json(rng, data, ("weight_map", "metadata", "total_size")),
        use_checkpoint,
    ),
    "dcp": Kind(_make_distributed, ("p/.metadata",), _mutate_pickle, use_checkpoint),
    "deepspeed": Kind(
        _make_zero,
        ("p/zero_pp_rank_0_mp_rank_00_model_states.pt", "p/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        mutate_pytorch,
        use_checkpoint,
    ),
    "megatron": Kind(
        _make_megatron,
        ("p/mp_rank_00_000/model_optim_rng.pt", "p/mp_rank_01_001/model_optim_rng.pt"),
        mutate_pytorch,
        use_checkpoint,
    ),
    "pytorch": Kind(_make_pytorch, ("p/pytorch_model.bin",), mutate_pytorch, use_checkpoint),
    "settings": Kind(
        make_models,
        ("a/tokenizer_config.json",),
        lambda rng, data: mutate_json(rng, data, ("auto_map", "AutoTokenizer")),
        use_checkpoint,
    ),
}
