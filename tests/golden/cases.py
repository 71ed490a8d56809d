"""The golden cases: recipes, and what is called with them.

Only the public API and recipes: nothing here may know how weightsmith is built. Models are folders of `inputs.INPUTS`; cases
run in the folder that holds them, so recipes name them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import weightsmith
from tests.golden import inputs

Recipe = Mapping[str, Any]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Golden:
    """One case.

    name      unique
    run       given an empty folder's path, makes a checkpoint there, or returns tensors that stay in memory. Takes options of
              `merge` and `moe` that must not change the bytes: threads, max_memory_bytes
    recipe    what it runs; {} where it calls something else
    portable  the bytes are the same on every machine; else they go through torch's linear algebra or a forward pass
    needs     modules without which the case cannot run
    """

    name: str
    run: Callable[..., Arrays | None] = field(repr=False)
    recipe: Recipe = field(default_factory=dict, repr=False)
    portable: bool = True
    needs: tuple[str, ...] = ()


def merged(name: str, recipe: Recipe, *, torch: bool = False, portable: bool = True, **options: Any) -> Golden:
    """A case of `merge`. torch: the method computes with torch."""

    def run(out: Path, **overrides: Any) -> None:
        weightsmith.merge(recipe, out, fsync=False, **{**options, **overrides})

    return Golden(name, run, recipe, portable and not torch, ("torch",) if torch else ())


def mixture(name: str, recipe: Recipe, *, needs: tuple[str, ...] = (), portable: bool = True, **options: Any) -> Golden:
    """A case of `moe`."""

    def run(out: Path, **overrides: Any) -> None:
        weightsmith.moe(recipe, out, fsync=False, **{**options, **overrides})

    return Golden(name, run, recipe, portable, needs)


def recipe(
    method: str, models: Sequence[str] = ("fr", "de"), base: str | None = "base", per_model: Recipe | None = None, **keys: Any
) -> Recipe:
    """A recipe of whole models. per_model: parameter → one value for each model; keys: `dtype`, and parameters of the merge."""
    top = {key: keys.pop(key) for key in ("dtype", "out_dtype") if key in keys}
    entries = [
        {"model": model, "parameters": {key: listed[i] for key, listed in (per_model or {}).items()}}
        for i, model in enumerate(models)
    ]
    return {"merge_method": method, **({"base_model": base} if base else {}), "models": entries, "parameters": keys, **top}


W2, W3 = {"weight": [0.7, 0.5]}, {"weight": [0.6, 0.4, 0.3]}
D2 = {"weight": [0.7, 0.5], "density": [0.4, 0.3]}
D3 = {"weight": [0.7, 0.5, 0.4], "density": [0.4, 0.3, 0.6]}
THREE = ("fr", "de", "py")
RL = ("rl_a", "rl_b")
MANY = ("base", *THREE, *RL, "sharded", "f16", "f32")

METHODS = (
    merged("linear", recipe("linear", THREE, None, W3)),
    merged("linear_unnormalised_f16", recipe("linear", THREE, None, W3, normalize=False, dtype="float16")),
    merged("task_arithmetic", recipe("task_arithmetic", THREE, per_model=W3, normalize=True, **{"lambda": 0.8})),
    merged("slerp", recipe("slerp", ("fr",), t=0.3)),
    merged("nuslerp", recipe("nuslerp", base=None, per_model=W2)),
    merged("nuslerp_rows", recipe("nuslerp", per_model=W2, nuslerp_flatten=False, nuslerp_row_wise=True)),
    merged("nuslerp_columns", recipe("nuslerp", per_model=W2, nuslerp_flatten=False)),
    merged("multislerp", recipe("multislerp", THREE, per_model=W3)),
    merged("multislerp_karcher", recipe("multislerp", THREE, None, W3, normalize_weights=False, karcher_steps=3)),
    merged("karcher", recipe("karcher", THREE, None)),
    merged("model_stock", recipe("model_stock", RL)),
    merged("model_stock_filter_wise", recipe("model_stock", RL, filter_wise=True)),
    merged("model_stock_pooled", recipe("model_stock", (*RL, "py"), cosine="pooled")),
    merged("nan", recipe("nan", THREE)),
    merged("geometric_median", recipe("geometric_median", THREE, None)),
    merged("ties", recipe("ties", THREE, per_model=D3, **{"lambda": 0.9})),
    # More than half of the deltas are zero, so the limit is, and the tie rule decides which zeros count.
    merged("ties_limit_zero", recipe("ties", RL, per_model={"weight": [0.7, 0.5], "density": [0.9, 0.8]})),
    merged("ties_row_l1", recipe("ties", per_model=D2, scope="row", rescale="l1")),
    merged("ties_model_inv_density", recipe("ties", per_model=D2, scope="model", rescale="inv_density", normalize=False)),
    merged("dare_linear", recipe("dare_linear", per_model=D2), seed=3),
    merged("dare_ties", recipe("dare_ties", THREE, per_model=D3, rescale="inv_density", normalize=True), seed=1),
    merged("della", recipe("della", per_model={**D2, "epsilon": [0.1, 0.2]}), seed=2),
    merged("della_linear", recipe("della_linear", per_model=D2, rescale="inv_probability"), seed=2),
    merged("breadcrumbs", recipe("breadcrumbs", per_model={**D2, "gamma": [0.02, 0.01]})),
    merged("breadcrumbs_row", recipe("breadcrumbs", per_model=D2, scope="row", rescale="inv_density")),
    merged("breadcrumbs_ties_model", recipe("breadcrumbs_ties", per_model=D2, scope="model", rescale="l1")),
    merged("task_vectors", recipe("task_vectors", per_model=D2, sparsify="magnitude", elect="count", combine="disjoint_mean")),
    merged("task_vectors_random", recipe("task_vectors", per_model=D2, sparsify="random", elect="sum", combine="mean"), seed=5),
    merged(
        "task_vectors_groups", recipe("task_vectors", per_model={**D2, "group": [64, 32]}, sparsify="groups", combine="absmax")
    ),
    merged(
        "task_vectors_row_rank",
        recipe("task_vectors", per_model=D2, sparsify="row_rank", rescale="inv_probability", elect="count"),
        seed=6,
    ),
    merged(
        "task_vectors_outliers", recipe("task_vectors", per_model=D2, sparsify="magnitude_outliers", scope="row", rescale="l1")
    ),
    merged("localize_and_stitch", recipe("localize_and_stitch", per_model={"density": [0.2, 0.1]})),
    merged("cabs", recipe("cabs", per_model={**W2, "group": [64, 64]})),
    merged("magmax", recipe("magmax", THREE)),
    merged("consensus_ta", recipe("consensus_ta", THREE, per_model={"threshold": [0.4, 0.3, 0.5]}, k=2)),
    merged("sce", recipe("sce", THREE, select_topk=0.2)),
    merged("sce_weights", recipe("sce", THREE, select_topk=0.1, select_applies_to="weights")),
    merged("sce_all", recipe("sce")),
    merged("ram", recipe("ram", RL)),
    merged("ramplus_tl", recipe("ramplus_tl", RL, r=0.5, alpha=0.9)),
    merged("ramplus", recipe("ramplus", RL, rescale=1.3)),
    merged("nearswap", recipe("nearswap", ("fr",), t=0.0005)),
    merged("arcee_fusion", recipe("arcee_fusion", ("fr",))),
    merged("train_difference", recipe("train_difference", **{"lambda": 0.8})),
    merged("extract_rows", recipe("extract_rows", alpha=0.4, beta=0.2, gamma=2.0)),
    merged("smooth_add", recipe("smooth_add", **{"lambda": 0.8})),
    merged("similarity_add", recipe("similarity_add", alpha=0.8, beta=0.5)),
    merged("cosine", recipe("cosine", ("fr",), alpha=0.2, low=0.9)),
    merged("cosine_b", recipe("cosine", ("fr",), form="b", low=0.5)),
    merged("splice", recipe("splice", ("fr",), alpha=0.4, beta=0.3)),
    merged("splice_columns", recipe("splice", ("fr",), alpha=0.7, beta=0.6, axis="columns")),
    merged("crossover", recipe("crossover", ("fr",), alpha=0.4, tilt=0.5), portable=False),
    merged("distribution_crossover", recipe("distribution_crossover", alpha=0.4, tilt=0.5), portable=False),
    merged("add_noise", recipe("add_noise", ("fr",), None, deviation=0.001)),
    merged("passthrough", recipe("passthrough", ("fr",), None)),
    merged("passthrough_scale", recipe("passthrough", ("fr",), None, {"scale": [0.5]})),
)

# float32 rows come from float64 arithmetic, so that what another processor rounds otherwise stays within 2 ulp.
S2 = ("small_a", "small_b")
MATRICES = tuple(
    merged(name, recipe(method, S2, None if method == "cart" else "small", dtype=dtype, **keys), torch=True)
    for name, method, dtype, keys in (
        ("tsv_m", "tsv_m", "float32", {"directions": 8, "lambda": 0.8}),
        ("tsv_m_bf16", "tsv_m", "bfloat16", {"flatten": 0.3}),
        ("svc", "svc", "float32", {}),
        ("wudi", "wudi", "float32", {"lambda": 0.7}),
        ("star", "star", "float32", {"eta": 0.5}),
        ("iso_c", "iso_c", "float32", {"beta": 0.3}),
        ("iso_cts", "iso_cts", "float32", {"common": 0.6}),
        ("resmerge", "resmerge", "float32", {}),
        ("rotate", "rotate", "float32", {"alpha": 0.2}),
        ("cart", "cart", "float32", {"rank": 0.2}),
        ("cart_bf16", "cart", "bfloat16", {"rank": 0.2}),
    )
)

STEPS = (
    merged("norm_match_mean", recipe("ties", per_model=D2, norm_match="mean")),
    merged("norm_match_max", recipe("dare_linear", per_model=D2, norm_match="max", delta_scale=0.5), seed=4),
    merged("norm_match_task_arithmetic", recipe("slerp", ("fr",), t=0.6, norm_match="task_arithmetic")),
    merged("delta_scale_by_layer", recipe("task_arithmetic", per_model=W2, delta_scale=[0.3, 0.9])),
    merged("spectrum_flatten", recipe("task_arithmetic", S2, "small", W2, spectrum="flatten", dtype="float32"), torch=True),
    merged(
        "spectrum_floor",
        recipe("ties", S2, "small", D2, spectrum="floor", spectrum_strength=0.1, norm_match="mean", dtype="float32"),
        torch=True,
    ),
    merged(
        "spectrum_calibrate", recipe("magmax", S2, "small", spectrum="calibrate", delta_scale=0.8, dtype="float32"), torch=True
    ),
)

BY_FILTER = {
    "t": [{"filter": "self_attn", "value": [0, 0.7]}, {"filter": "mlp", "value": [0.8, 0.2]}, {"value": 0.4}],
}
SLICES = {
    "merge_method": "passthrough",
    "slices": [
        {"sources": [{"model": "small", "layer_range": [0, 2]}]},
        {
            "sources": [
                {
                    "model": "small_a",
                    "layer_range": [1, 2],
                    "parameters": {
                        "scale": [
                            {"filter": "o_proj", "value": 0.0},
                            {"filter": "down_proj", "value": 0.5},
                            {"value": 1.0},
                        ]
                    },
                }
            ]
        },
        {"sources": [{"model": "small_b", "layer_range": [0, 2]}]},
    ],
}
MERGED_SLICES = {
    "merge_method": "ties",
    "base_model": "small",
    "slices": [
        {
            "sources": [
                {"model": "small", "layer_range": [0, 1]},
                {"model": "small_a", "layer_range": [0, 1], "parameters": {"weight": 0.5}},
            ]
        },
        {
            "sources": [
                {"model": "small", "layer_range": [0, 2]},
                {"model": "small_a", "layer_range": [0, 2]},
                {"model": "small_b", "layer_range": [0, 2], "parameters": {"weight": [0.2, 0.9]}},
            ],
            "parameters": {"density": 0.6},
        },
    ],
    "parameters": {"weight": 1, "density": 0.3},
}
MODULES = {
    "merge_method": "linear",
    "modules": {
        "language_model": {
            "models": [
                {"model": "vision", "parameters": {"weight": 0.4}},
                {"model": "vision_a", "parameters": {"weight": [0.2, 0.8]}},
            ]
        },
        "multi_modal_projector": {"models": [{"model": "vision_a", "parameters": {"weight": 1}}]},
    },
}

SHAPES = (
    merged("slerp_gradients_and_filters", recipe("slerp", ("fr",), **BY_FILTER)),
    merged("slices_stacked", SLICES),
    merged("slices_merged", MERGED_SLICES),
    merged("modules", MODULES),
    merged("fused_ties", recipe("ties", ("phi3_a", "phi3_b"), "phi3", D2)),
    merged("fused_slerp", recipe("slerp", ("phi3_a",), "phi3", t=0.4)),
    merged("fused_dare", recipe("dare_ties", ("phi3_a", "phi3_b"), "phi3", D2), seed=8),
    merged("fused_tsv_m", recipe("tsv_m", ("phi3_a", "phi3_b"), "phi3", dtype="float32"), torch=True),
    merged("fused_experts_ties", recipe("ties", ("fused_1", "fused_2"), "fused", D2)),
    merged("fused_experts_model_stock", recipe("model_stock", ("fused_1", "fused_2"), "fused")),
    merged("fused_experts_iso_c", recipe("iso_c", ("fused_1", "fused_2"), "fused", dtype="float32"), torch=True),
    merged("transposed_experts_della", recipe("della", ("transposed_1", "transposed_2"), "transposed", D2), seed=9),
    merged("tied_head", recipe("task_arithmetic", ("tied_a",), "tied", {"weight": [0.8]})),
    merged("odd_tensors_ties", recipe("ties", ("odd_a", "odd_b"), "odd", D2)),
    merged("odd_tensors_linear_f16", recipe("linear", ("odd_a", "odd_b"), None, W2, dtype="float16")),
    merged("several_tiles_ties", recipe("ties", ("tall_a", "tall_b"), "tall", D2)),
    merged("several_tiles_sce", recipe("sce", ("tall_a", "tall_b"), "tall", select_topk=0.3)),
    merged("several_tiles_nuslerp_columns", recipe("nuslerp", ("tall_a", "tall_b"), None, W2, nuslerp_flatten=False)),
    merged("several_tiles_dare", recipe("dare_linear", ("tall_a", "tall_b"), "tall", D2), seed=10),
    merged("many_models", recipe("linear", MANY, None, {"weight": [*range(1, len(MANY) + 1)]}, dtype="bfloat16")),
)

DTYPES = (
    merged("mixed_16_bit", recipe("linear", ("base", "f16"), None, W2)),
    merged("mixed_f32_to_bf16", recipe("ties", ("fr", "f32"), per_model=D2, dtype="bfloat16")),
    merged("mixed_f64", recipe("task_arithmetic", ("small_a", "small_f64"), "small", W2)),
    merged("f64_to_bf16", recipe("slerp", ("small_f64",), "small", t=0.5, dtype="bfloat16")),
    merged("f32_ties", recipe("ties", ("f32", "fr"), per_model=D2, dtype="float32")),
    merged("f32_dare_ties", recipe("dare_ties", ("f32", "fr"), per_model=D2, dtype="float32"), seed=1),
    merged("out_dtype", recipe("sce", ("fr", "f32"), dtype="float32", out_dtype="float16")),
    merged("copied_to_f32", recipe("passthrough", ("f16",), None, dtype="float32")),
)

ADAPTERS = (
    merged("lora_passthrough", recipe("passthrough", ("base+lora",), None)),
    merged("lora_ties", recipe("ties", ("base+lora", "fr"), per_model=D2)),
    merged("lora_f32", recipe("task_arithmetic", ("llama_0+lora_patterns",), "llama_0", {"weight": [0.5]}, dtype="float32")),
)

SHARDS = (
    merged("shards_out", recipe("linear", THREE, None, W3), max_shard_bytes=300_000),
    merged("shards_in", recipe("ties", ("sharded", "fr"), per_model=D2)),
    merged("shards_in_and_out", recipe("passthrough", ("sharded",), None), max_shard_bytes=500_000),
)

OWN = (
    merged(
        "own_block_method", recipe("./my_method.py:agree", per_model=W2, power=[0.5, 1.0], delta_scale=0.9), allow_code=True
    ),
    merged("own_tensor_method", recipe("./my_method.py:by_rows", S2, None, W2), allow_code=True),
    merged("own_tensor_method_fused", recipe("./my_method.py:by_rows", ("fused_1", "fused_2"), None, W2), allow_code=True),
)


# ---- interrupted work

SHARD_BYTES = 400_000
INFINITE = recipe("ties", ("fr", "infinite"), per_model=D2)


def _resumed(function: Callable[..., Any], recipe: Recipe) -> Callable[..., None]:
    """Stopped by an infinity in a tensor that comes late, then resumed with infinities allowed."""

    def run(out: Path, **overrides: Any) -> None:
        options = {"fsync": False, "max_shard_bytes": SHARD_BYTES, **overrides}
        try:
            function(recipe, out, **options)
        except weightsmith.WeightsmithError:
            done = function(recipe, out, allow_nonfinite=True, **options)
            assert done.resumed > 5, f"only {done.resumed} tensors were finished before the interruption"
        else:
            raise AssertionError("the infinity was not found")

    return run


# ---- in memory


def _state_dict(tuned: int, dtype: np.dtype[Any] = inputs.BF16) -> Arrays:
    return inputs.values({**inputs.llama_shapes(*inputs.SMALL), "experts": (3, 40, 24), "tall": (1200, 64)}, tuned, dtype)


def _in_memory(method: str, tuned: Sequence[int], *, base: bool = True, **keys: Any) -> Callable[..., Arrays]:
    def run(out: Path, threads: int | None = None, max_memory_bytes: int | None = None) -> Arrays:
        models = [_state_dict(k) for k in tuned]
        return weightsmith.merge_state_dicts(method, models, base=_state_dict(0) if base else None, threads=threads, **keys)

    return run


def _torch_in_memory(out: Path, threads: int | None = None, max_memory_bytes: int | None = None) -> Arrays:
    """torch tensors, some of them transposed views."""
    import torch

    def tensor(array: np.ndarray) -> Any:
        converted = torch.from_numpy(array.astype(np.float32)).bfloat16()
        return converted.T.contiguous().T if converted.ndim == 2 else converted

    models = [{name: tensor(array) for name, array in _state_dict(k).items()} for k in range(3)]
    merged_tensors = weightsmith.merge_state_dicts(
        "dare_ties", models[1:], base=models[0], threads=threads, seed=4, weight=1, density=0.5
    )
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy() for name, t in merged_tensors.items()}


IN_MEMORY = (
    Golden("memory_ties", _in_memory("ties", (1, 2), weight=[0.7, 0.5], density=0.4, lambda_=0.9)),
    Golden("memory_linear_f32", _in_memory("linear", (1, 2, 3), base=False, weight=[1, 2, 3], out_dtype="float32")),
    Golden("memory_breadcrumbs_model", _in_memory("breadcrumbs", (1, 2), weight=1, density=0.3, scope="model")),
    Golden("memory_torch", _torch_in_memory, needs=("torch",)),
)


# ---- mixtures of experts


def experts(
    models: Sequence[str] = ("llama_0", "llama_1"), base: Any = "llama_0", per_expert: Recipe | None = None, **keys: Any
) -> Recipe:
    """A recipe of `moe` with random gates. per_expert: keys of every expert."""
    listed = [{"source_model": model, **(per_expert or {})} for model in models]
    return {"base_model": base, "experts": listed, "gate_mode": "random", **keys}


def _of(kind: str, architecture: str, *, shared: bool = False, **keys: Any) -> Recipe:
    options = {"shared_experts": [{"source_model": f"{kind}_1", "residual_scale": 0.5}]} if shared else {}
    return experts((f"{kind}_0", f"{kind}_1", f"{kind}_1"), f"{kind}_0", architecture=architecture, **options, **keys)


LAYOUTS = (
    mixture("moe_mixtral", _of("llama", "mixtral"), seed=1),
    mixture("moe_mixtral_f32", _of("llama", "mixtral", dtype="float32", router_scale=0.02), seed=1),
    mixture("moe_qwen3_moe", _of("qwen3", "qwen3_moe", gate_mode="uniform_random"), seed=2),
    mixture("moe_granitemoe", _of("granite", "granitemoe"), seed=3),
    mixture("moe_flex_olmo", _of("olmo2", "flex_olmo"), seed=4),
    mixture("moe_qwen2_moe", _of("qwen2", "qwen2_moe", shared=True), seed=5),
    mixture("moe_qwen2_moe_zero_biases", _of("llama", "qwen2_moe", shared=True), seed=5),
    mixture("moe_glm4_moe", _of("llama", "glm4_moe", shared=True), seed=6),
    mixture("moe_dots1", _of("qwen3", "dots1", shared=True), seed=7),
    mixture("moe_deepseek_v3", _of("deepseek_v3", "deepseek_v3", shared=True), seed=8),
    mixture("moe_deepseek_v2", _of("deepseek_v2", "deepseek_v2", shared=True), seed=9),
    mixture("moe_deepseek", _of("llama", "deepseek"), seed=10),
    mixture("moe_olmoe", _of("olmoe", "olmoe"), seed=11),
    mixture("moe_phi3", experts(("phi3", "phi3_a"), "phi3"), seed=12),
    mixture("moe_shards", _of("llama", "mixtral"), seed=1, max_shard_bytes=30_000),
)

MERGED_BASE = {"merge_method": "linear", "models": [{"model": "llama_1"}, {"model": "llama_2"}], "parameters": {"weight": 1}}
TIES_EXPERT = recipe("ties", ("llama_1", "llama_2"), "llama_0", D2)

INFINITE_BASE = {**MERGED_BASE, "models": [{"model": "llama_1"}, {"model": "llama_infinite"}]}
INFINITE_MIXTURE = experts(("llama_0", "llama_1"), INFINITE_BASE, {"copies": 2, "noise_scale": 0.01})
RESUMED = (
    merged("infinite", INFINITE, allow_nonfinite=True, max_shard_bytes=SHARD_BYTES),
    Golden("infinite_resumed", _resumed(weightsmith.merge, INFINITE)),
    mixture("moe_infinite", INFINITE_MIXTURE, allow_nonfinite=True, max_shard_bytes=SHARD_BYTES),
    Golden("moe_infinite_resumed", _resumed(weightsmith.moe, INFINITE_MIXTURE)),
)

UPCYCLING = (
    mixture("moe_noise", experts(("llama_0",), per_expert={"copies": 4, "noise_scale": 0.02, "noise_fraction": 0.5}), seed=1),
    mixture("moe_drop", experts(("llama_0",), per_expert={"copies": 4, "drop_fraction": 0.5}), seed=1),
    mixture(
        "moe_drop_noise_fused",
        experts(
            ("granite_0",),
            "granite_0",
            {"copies": 2, "drop_fraction": 0.25, "noise_scale": 0.01, "residual_scale": 0.7},
            architecture="granitemoe",
        ),
        seed=2,
    ),
    mixture(
        "moe_virtual_groups",
        experts(("llama_0",), per_expert={"copies": 2}, virtual_groups=4, experts_per_token=4, router_scale=0.02),
        seed=1,
    ),
    mixture(
        "moe_virtual_groups_noise",
        experts(("phi3",), "phi3", {"copies": 2, "noise_scale": 0.01}, virtual_groups=2, experts_per_token=2),
        seed=1,
    ),
    mixture("moe_merged_base", experts(("llama_1", "llama_2"), MERGED_BASE), seed=1),
    mixture(
        "moe_merged_expert",
        {
            "base_model": "llama_0",
            "gate_mode": "random",
            "experts": [{"source_model": TIES_EXPERT}, {"source_model": "llama_1", "drop_fraction": 0.5}],
        },
        seed=1,
    ),
    mixture("moe_lora_expert", experts(("llama_0+lora_patterns", "llama_1")), seed=1),
)

PROMPTS = (
    {"source_model": "llama_0", "positive_prompts": ["w3 w4 w5 w6 w9", "w8 w9 w10"], "prompts_file": "prompts_1.txt"},
    {
        "source_model": "llama_1",
        "positive_prompts": ["w40 w41 w42", "w50 w51 w60 w61"],
        "negative_prompts": ["w3 w40"],
        "prompts_file": "prompts_2.txt",
    },
)
GATES = tuple(
    mixture(
        f"moe_gate_{name}",
        {"base_model": base, "gate_mode": mode, "experts": list(PROMPTS), **keys},
        needs=("torch", "transformers"),
        portable=False,
        routing_report=False,
    )
    for name, mode, base, keys in (
        ("hidden", "hidden", "llama_0", {}),
        ("hidden_avg_glm", "hidden_avg", "llama_0", {"architecture": "glm4_moe"}),
        ("cheap_embed", "cheap_embed", "llama_0", {}),
        ("router_input", "router_input", "llama_0", {"prompt_tokens": 6}),
        ("hidden_of_a_merge", "hidden", {**MERGED_BASE, "base_model": "llama_0", "parameters": {"weight": 0.5}}, {}),
    )
)

PAIRS = {"groups": [[0, 2], [3, 1]]}
MATCHED = {**PAIRS, "weights": [[0.7, 0.3], [1, 2]], "match": True}
SURGERY = (
    mixture("prune_own", {"model": "own", "prune_experts": {"keep": [3, 0]}}),
    mixture("prune_fused_by_layer", {"model": "fused", "prune_experts": {"keep_by_layer": {0: [2, 1, 0], 1: [3, 1, 2]}}}),
    mixture("prune_transposed_saliency", {"model": "transposed", "prune_experts": {"saliency": "saliency.json", "experts": 2}}),
    mixture("prune_paired_f32", {"model": "paired", "prune_experts": {"keep": [1, 2, 3]}, "dtype": "float32"}),
    mixture("merge_experts_own", {"model": "own", "merge_experts": {**PAIRS, "router": "mean"}}),
    mixture("merge_experts_own_match", {"model": "own", "merge_experts": MATCHED}, needs=("scipy",)),
    mixture("merge_experts_fused_match", {"model": "fused", "merge_experts": {**MATCHED, "router": "mean"}}, needs=("scipy",)),
    mixture("merge_experts_transposed_match", {"model": "transposed", "merge_experts": MATCHED}, needs=("scipy",)),
    mixture("merge_experts_paired_match", {"model": "paired", "merge_experts": MATCHED}, needs=("scipy",)),
    mixture(
        "merge_experts_by_layer",
        {
            "model": "own",
            "merge_experts": {
                "groups_by_layer": {0: [[0], [1, 2, 3]], 1: [[2, 0], [1, 3]]},
                "weights_by_layer": {0: [[1], [1, 2, 3]], 1: [[3, 1], [1, 1]]},
            },
        },
    ),
)

CASES = (
    *METHODS,
    *MATRICES,
    *STEPS,
    *SHAPES,
    *DTYPES,
    *ADAPTERS,
    *SHARDS,
    *OWN,
    *RESUMED,
    *IN_MEMORY,
    *LAYOUTS,
    *UPCYCLING,
    *GATES,
    *SURGERY,
)
