"""A mixture of experts that are all the base computes what the base does, in every architecture."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.moe_help import DENSE, TOKENS, Models, config_of, edit_config, edit_tensors, load, logits, make_mixture, recipe
from tests.plan_help import prepare_moe
from weightsmith._base.errors import PlanError
from weightsmith._features.mixture.layouts import LAYOUTS
from weightsmith._features.mixture.layouts.dense_config import DEFAULTS, KNOWN, semantics
from weightsmith.abc.layout import ExpertLayout

NATIVE = [layout for layout in LAYOUTS if layout.name not in ("deepseek", "olmoe")]
SPECIAL = {
    "mixtral": ["llama-scaled", "llama-linear", "llama-wide", "mistral-window", "phi3-window", "phi3-long"],
    "qwen2_moe": ["llama-scaled", "llama-wide", "mistral-window", "ministral-mixed", "qwen2-window", "phi3-long"],
    "qwen3_moe": ["qwen3-biased", "qwen3-window"],
    "granitemoe": ["granite-biased", "llama-biased", "llama-scaled", "llama-wide"],
    "glm4_moe": ["phi3-partial", "llama-scaled", "llama-wide"],
    "dots1": ["qwen3-biased", "qwen3-window", "qwen3-mixed"],
    "flex_olmo": ["olmo2-biased"],
    "deepseek_v3": ["youtu-biased", "deepseek_v3-halves"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small take longer on several
    yield Models(tmp_path_factory.mktemp("dense"))
    torch.set_num_threads(threads)


def source_of(layout: ExpertLayout, models: Models, name: str, *, tied: bool = False) -> dict[str, Any]:
    """A recipe that makes the base again: where a shared expert must be there, it puts out nothing."""
    base = models.dense(name, tied=tied)
    keys: dict[str, Any] = {"architecture": layout.name}
    if layout.shared_experts[0]:
        keys["shared_experts"] = [{"source_model": str(models.dense(name, tied=tied, down=0.0))}]
    if layout.name == "deepseek_v2":
        keys["experts_per_token"] = 4  # of four experts: transformers does not divide by the sum
    return recipe(base, **keys)


def pairs() -> Iterator[Any]:
    """Every layout with every model type that it says it can hold, and with what is special in some of them.

    Each run of the tests takes each layout with its first model, also with tied embeddings, and each other model once.
    """
    seen = set[str]()
    for layout in NATIVE:
        for name in (*layout.dense, *SPECIAL.get(layout.name, ())):
            for tied in (False, True) if name in DEFAULTS else (False,):
                first = name == layout.dense[0]
                marks = () if first or (name not in seen and not tied) else pytest.mark.sweep
                yield pytest.param(layout, name, tied, id=f"{layout.name}-{name}{'-tied' if tied else ''}", marks=marks)
            seen.add(name)


@pytest.mark.matrix("mixtral-*", "*-tied", "deepseek_v3-*", "*-window")
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name", "tied"), list(pairs()))
def test_equals_the_dense_model(layout: ExpertLayout, name: str, tied: bool, models: Models, tmp_path: Path) -> None:
    make_mixture(source_of(layout, models, name, tied=tied), tmp_path / "out")
    assert_equal(logits(tmp_path / "out"), models.logits(name, tied=tied))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.matrix("mixtral", "granitemoe", "deepseek_v3")
@pytest.mark.slow
@pytest.mark.parametrize("layout", NATIVE, ids=lambda layout: layout.name)
def test_generates_in_bf16_and_has_the_names_that_transformers_writes(
    layout: ExpertLayout, models: Models, tmp_path: Path
) -> None:
    make_mixture(source_of(layout, models, layout.dense[0]), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    tokens = model.generate(TOKENS[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, TOKENS.shape[1] + 4)
    with torch.no_grad():
        actual = model(TOKENS).logits.float()
    expected = models.logits(layout.dense[0])
    assert float((actual - expected).abs().max() / expected.abs().max()) < 0.1
    model.save_pretrained(tmp_path / "again")
    assert headers(tmp_path / "out") == headers(tmp_path / "again")


def headers(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}


# ---- experts that differ


@pytest.mark.long
@pytest.mark.parametrize("layout", NATIVE, ids=lambda layout: layout.name)
def test_every_expert_is_in_its_place(layout: ExpertLayout, models: Models, tmp_path: Path) -> None:
    """The matrices of each expert, and of the shared one, as transformers has them in memory."""
    name = layout.dense[0]
    donors = [models.dense(name, seed=seed) for seed in range(3)]
    source = recipe(donors[0], architecture=layout.name)
    source["experts"] = [{"source_model": str(donor)} for donor in donors]
    if layout.shared:
        source["shared_experts"] = [{"source_model": str(donors[2])}]
    make_mixture(source, tmp_path / "out")
    mixture, dense = load(tmp_path / "out"), [load(donor) for donor in donors]
    for i, layer in enumerate(mixture.model.layers):
        block = layer.block_sparse_moe if layout.name == "granitemoe" else layer.mlp
        for e, model in enumerate(dense):
            gate, up, down = parts(model.model.layers[i].mlp)
            assert torch.equal(block.experts.gate_up_proj[e], torch.cat((gate, up))), (i, e)
            assert torch.equal(block.experts.down_proj[e], down), (i, e)
        if layout.shared:
            shared = block.shared_expert if layout.name == "qwen2_moe" else block.shared_experts
            for matrix, expected in zip(parts(shared), parts(dense[2].model.layers[i].mlp), strict=True):
                assert torch.equal(matrix, expected)


def parts(mlp: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if hasattr(mlp, "gate_up_proj"):
        return (*mlp.gate_up_proj.weight.chunk(2), mlp.down_proj.weight)
    return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight


ADDED = [layout for layout in NATIVE if layout.shared_experts == (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ADDED, ids=lambda layout: layout.name)
def test_a_shared_expert_is_added(layout: ExpertLayout, models: Models, tmp_path: Path) -> None:
    """Routed and shared experts of half the base's output make the whole; of all of it, the plan warns."""
    name = layout.dense[0]
    half = {"source_model": str(models.dense(name, down=0.5))}
    everyone = {"experts_per_token": 4} if layout.name == "deepseek_v2" else {}
    source = recipe(models.dense(name), architecture=layout.name, shared_experts=[half], **everyone) | {"experts": [half] * 4}
    assert any("residual_scale: 0.5" in warning for warning in make_mixture(source, tmp_path / "out"))
    assert_equal(logits(tmp_path / "out"), models.logits(name))


@pytest.mark.long
@pytest.mark.parametrize("layout", [*ADDED, LAYOUTS.get("qwen2_moe")], ids=lambda layout: layout.name)
def test_what_the_warning_says_begins_where_the_base_is(layout: ExpertLayout, models: Models, tmp_path: Path) -> None:
    name = layout.dense[0]
    base = str(models.dense(name))
    routed, shared = (1.0, 0.0) if layout.name == "qwen2_moe" else (0.5, 0.5)
    source = recipe(models.dense(name), architecture=layout.name)
    source["experts"] = [{"source_model": base, "residual_scale": routed}] * 2
    source["shared_experts"] = [{"source_model": base, "residual_scale": shared}]
    assert not any("residual_scale" in warning for warning in make_mixture(source, tmp_path / "out"))
    assert_equal(logits(tmp_path / "out"), models.logits(name))


def test_no_shared_expert_is_told(models: Models, tmp_path: Path) -> None:
    warnings = make_mixture(recipe(models.dense("llama"), architecture="glm4_moe"), tmp_path / "out")
    assert any("n_shared_experts: 0" in warning for warning in warnings)


def test_a_shared_qwen_expert_is_told(models: Models, tmp_path: Path) -> None:
    base = models.dense("qwen2")
    source = recipe(base, shared_experts=[{"source_model": str(base)}])
    assert any("residual_scale: 0 for the shared expert" in warning for warning in make_mixture(source, tmp_path / "out"))
    source["shared_experts"] = [{"source_model": str(base), "residual_scale": 0}]
    (warning,) = make_mixture(source, tmp_path / "silent")
    assert "llama.cpp ignores norm_topk_prob" in warning
    assert not make_mixture(source | {"experts_per_token": 4}, tmp_path / "all")  # of all experts the weights sum to 1


def test_deepseek_v2_says_what_transformers_does_not_read(models: Models, tmp_path: Path) -> None:
    base = models.dense("deepseek_v2")
    warnings = make_mixture(recipe(base, architecture="deepseek_v2"), tmp_path / "out")
    assert any("transformers ignores norm_topk_prob: true" in warning for warning in warnings)
    assert float((logits(tmp_path / "out") - models.logits("deepseek_v2")).abs().max()) > 0.01


# ---- DeepSeek's first and OLMoE, which no dense model of transformers and no class of it answer to


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama-linear", "phi3", "mistral"])
def test_deepseek_of_remote_code(name: str, shared: bool, models: Models, tmp_path: Path) -> None:
    """As deepseek-moe-16b-base has it: names, keys, and the router's arithmetic on the base's own attention."""
    half = {"source_model": str(models.dense(name, down=0.5))}
    source = recipe(models.dense(name), architecture="DeepSeek MoE")
    if shared:
        source |= {"experts": [half] * 4, "shared_experts": [half]}
    warnings = make_mixture(source, tmp_path / "out")
    assert any("transformers has no class for it" in warning for warning in warnings)
    config = config_of(tmp_path / "out")
    code = "deepseek-ai/deepseek-moe-16b-base--modeling_deepseek.DeepseekForCausalLM"
    expected_keys = {
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "n_routed_experts": 4,
        "n_shared_experts": 1 if shared else None,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        "moe_intermediate_size": 48,
        "rope_theta": 1e5 if name == "llama-linear" else 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0} if name == "llama-linear" else None,
    }
    assert {key: config[key] for key in expected_keys} == expected_keys
    assert config["auto_map"]["AutoModelForCausalLM"] == code
    assert not config.keys() & {"rope_parameters", "sliding_window", "layer_types"}
    with pytest.raises((ValueError, OSError)):  # a new class in transformers: load the model with it here
        transformers.AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=False)

    tensors = load_tensors(tmp_path / "out")
    model = load(models.dense(name))
    for i, layer in enumerate(model.model.layers):
        layer.mlp = FirstDeepseek({n.removeprefix(f"model.layers.{i}.mlp."): t for n, t in tensors.items()}, shared)
    with torch.no_grad():
        actual = model(TOKENS).logits
    assert_equal(actual, models.logits(name))


class FirstDeepseek(torch.nn.Module):
    """Softmax of all logits, the two largest divided by their sum, the shared expert added."""

    def __init__(self, tensors: dict[str, torch.Tensor], shared: bool) -> None:
        super().__init__()
        self.tensors, self.shared = tensors, shared

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self.tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = (x @ self.tensors["gate.weight"].T).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack([self.mlp(x, f"experts.{e}") for e in range(4)], -2)
        routed = (outputs.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1])) * weights[..., None]).sum(-2)
        return routed + self.mlp(x, "shared_experts") if self.shared else routed


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).float() for name in file.keys()}


@pytest.mark.long
def test_olmoe_of_a_model_with_its_norms(models: Models, tmp_path: Path) -> None:
    """Its one-expert form, written as a dense model of a type that nobody knows."""
    arguments = {**DENSE["llama"][1], "num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": True, "clip_qkv": 0.5}
    torch.manual_seed(0)
    single = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**arguments))
    for parameter in single.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    single.to(torch.bfloat16).save_pretrained(tmp_path / "single")

    def as_dense(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if "mlp.gate." not in name:
                tensors[name.replace(".experts.0", "")] = tensor

    edit_tensors(tmp_path / "single", tmp_path / "renamed", as_dense)
    dense = edit_config(tmp_path / "renamed", tmp_path / "dense", lambda config: config.update(model_type="mine"))
    warnings = make_mixture(recipe(dense, architecture="olmoe"), tmp_path / "out")
    assert any("it is not known to be equivalent to mine models" in warning for warning in warnings)
    expected = logits(tmp_path / "single")
    assert_equal(logits(tmp_path / "out"), expected)


# ---- config.json


def old_style(config: dict[str, Any]) -> None:
    """As transformers 4 wrote it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if share := rope.pop("partial_rotary_factor", None):
        config["partial_rotary_factor"] = share
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")


def shortest(config: dict[str, Any]) -> None:
    """Only what differs from the defaults of the class, and the sizes."""
    default = transformers.AutoConfig.for_model(config["model_type"])
    for key in list(config):
        if key not in ("model_type", "dtype", "rope_parameters") and config[key] == getattr(default, key, ...):
            del config[key]
    if config["rope_parameters"] == getattr(default, "rope_parameters", None):
        del config["rope_parameters"]
    else:
        config["rope_parameters"].pop("rope_theta", None)


OTHER_CONFIGS = [
    ("mixtral", "llama"),
    ("mixtral", "llama-linear"),
    ("mixtral", "mistral-window"),
    ("mixtral", "phi3-long"),
    ("mixtral", "smollm3"),
    ("qwen2_moe", "qwen2-window"),
    ("qwen2_moe", "seed_oss"),
    ("qwen3_moe", "qwen3"),
    ("glm4_moe", "llama"),
    ("glm4_moe", "phi3-partial"),
    ("granitemoe", "granite"),
    ("flex_olmo", "olmo2"),
    ("deepseek_v3", "youtu"),
]


def without_theta(config: dict[str, Any]) -> None:
    """The base of the rotary embeddings is the default of the class."""
    del config["rope_parameters"]["rope_theta"]


@pytest.mark.matrix("mixtral-*", "deepseek_v3-*", "*-without_theta")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name", "edit"),
    [(o, n, old_style) for o, n in OTHER_CONFIGS]
    + [(o, n, shortest) for o, n in OTHER_CONFIGS if n in ("smollm3", "seed_oss", "granite", "youtu", "mistral-window")]
    + [("mixtral", "llama", without_theta), ("flex_olmo", "olmo2", without_theta)],
)
def test_other_config_of_the_same_model(layout: str, name: str, edit: Any, models: Models, tmp_path: Path) -> None:
    base = edit_config(models.dense(name), tmp_path / "base", edit)
    expected = models.logits(name)
    source = source_of(LAYOUTS.get(layout), models, name) | {"base_model": str(base)}
    make_mixture(source, tmp_path / "out")
    torch.testing.assert_close(logits(base), expected)
    assert_equal(logits(tmp_path / "out"), expected)


@pytest.mark.long
def test_keys_that_the_dense_class_does_not_read(models: Models, tmp_path: Path) -> None:
    """A Llama with a sliding window of five has none; the Mixtral of it would have."""

    def stray(config: dict[str, Any]) -> None:
        config |= {"sliding_window": 5, "use_sliding_window": True, "attention_multiplier": 9.0, "partial_rotary_factor": 0.5}

    base = edit_config(models.dense("llama"), tmp_path / "base", stray)
    expected = models.logits("llama")
    for architecture in ("mixtral", "granitemoe", "glm4_moe"):
        make_mixture(recipe(base, architecture=architecture), tmp_path / architecture)
        actual = logits(tmp_path / architecture)
        assert_equal(actual, expected)


CLASSES = {name: kind for name, (kind, _) in DENSE.items() if name in DEFAULTS}


def fields(kind: str) -> dict[str, Any]:
    """What a config class reads, with its defaults."""
    cls = getattr(transformers, f"{kind}Config")
    annotated = set().union(*(inspect.get_annotations(c) for c in cls.__mro__ if c is not transformers.PreTrainedConfig))
    defaults = {field.name: field.default for field in dataclasses.fields(cls) if field.name in annotated}
    return defaults | {"rope_theta": cls.default_theta}


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(name: str) -> None:
    theirs = {key: value for key, value in fields(CLASSES[name]).items() if key in KNOWN}
    ours = dict(DEFAULTS[name])
    if "head_dim" not in theirs:  # read where it is given, and hidden_size / num_attention_heads where not
        assert ours.pop("head_dim") is None
    assert ours == theirs


WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}


@pytest.mark.parametrize(("layout", "name"), [pytest.param(o, d, id=f"{o.name}-{d}") for o in NATIVE for d in o.dense])
def test_differing_defaults_are_written_out(layout: ExpertLayout, name: str, models: Models) -> None:
    """Every key that both classes read, and read differently where it is not there, is in the config that is made."""
    with prepare_moe(source_of(layout, models, name)) as prepared:
        config = dict(prepared.plan.config or {})
    after = transformers.AutoConfig.for_model(**config)
    dense, mixture = fields(CLASSES[name]), fields(type(after).__name__.removesuffix("Config"))
    differing = {key for key in dense.keys() & mixture.keys() if dense[key] != mixture[key]} - WINDOWS
    assert "rope_theta" in (config.get("rope_parameters") or config)
    written = config.keys() | {after.attribute_map.get(key, key) for key in config}
    written |= {key for key, other in after.attribute_map.items() if other in config}
    unread = {"rope_theta", "head_dim"} if config.get("kv_lora_rank") else {"rope_theta"}
    assert not differing - written - unread
    before = transformers.AutoConfig.from_pretrained(models.dense(name))
    for key in differing & KNOWN - unread:
        assert getattr(after, key) == getattr(before, key), key


def test_semantics_of_windows() -> None:
    llama = {"model_type": "llama", "num_hidden_layers": 2, "sliding_window": 8}
    assert semantics(llama)["sliding_window"] is None
    assert semantics({"model_type": "mistral", "num_hidden_layers": 1})["sliding_window"] == 4096
    off = {"model_type": "qwen2", "num_hidden_layers": 2, "sliding_window": 8, "use_sliding_window": False}
    assert semantics(off)["layer_types"] == ["full_attention"] * 2
    on = {**off, "use_sliding_window": True, "max_window_layers": 1}
    assert semantics(on)["layer_types"] == ["full_attention", "sliding_attention"]
    unread = {"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": 8, "layer_types": ["full_attention"]}
    assert semantics(unread)["layer_types"] == ["sliding_attention"]
    smollm3 = {"model_type": "smollm3", "num_hidden_layers": 1, "sliding_window": 8, "use_sliding_window": True}
    assert semantics(smollm3)["layer_types"] == ["full_attention"]


def test_semantics_of_long_phi3() -> None:
    rope = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
    for key in ("rope_scaling", "rope_parameters"):
        full = semantics({"model_type": "phi3", "original_max_position_embeddings": 8, key: rope})
        assert full[key]["rope_type"] == "longrope"
        assert full[key]["original_max_position_embeddings"] == 8


@pytest.mark.parametrize(("layout", "name"), [("glm4_moe", "llama"), ("deepseek_v3", "deepseek_v3")])
def test_there_are_no_layers_that_predict_further_tokens(layout: str, name: str, models: Models) -> None:
    """The default is one: a program would look for it."""
    with prepare_moe(recipe(models.dense(name), architecture=layout)) as prepared:
        assert (prepared.plan.config or {})["num_nextn_predict_layers"] == 0


# ---- which one


def planned(source: dict[str, Any]) -> str:
    """The model type of the output."""
    with prepare_moe(source) as prepared:
        return str((prepared.plan.config or {})["model_type"])


@pytest.mark.parametrize(
    ("name", "shared", "expected"),
    [
        ("llama", 0, "mixtral"),
        ("mistral-window", 0, "mixtral"),
        ("llama-biased", 0, "granitemoe"),
        ("qwen2", 1, "qwen2_moe"),
        ("qwen2", 0, "glm4_moe"),
        ("qwen3", 0, "qwen3_moe"),
        ("qwen3-mixed", 0, "dots1"),
        ("granite", 0, "granitemoe"),
        ("olmo2", 0, "flex_olmo"),
        ("youtu", 1, "deepseek_v3"),
        ("phi3-partial", 1, "glm4_moe"),
    ],
)
def test_the_first_that_can(name: str, shared: int, expected: str, models: Models) -> None:
    base = models.dense(name)
    keys = {"shared_experts": [{"source_model": str(base)}]} if shared else {}
    assert planned(recipe(base, **keys)) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [("mixtral", "mixtral"), ("Mixtral", "mixtral"), ("deepseek", "deepseek"), ("DeepSeek MoE", "deepseek")],
)
def test_names_of_mergekit(written: str, expected: str, models: Models) -> None:
    assert planned(recipe(models.dense("llama"), architecture=written)) == expected


def test_deepseek_alone_is_the_first_of_them(models: Models) -> None:
    with pytest.raises(PlanError, match=r"deepseek: .*\n.*Write architecture: deepseek_v3"):
        planned(recipe(models.dense("youtu"), architecture="deepseek"))


@pytest.mark.parametrize("written", ["qwen", "qwen moe", "Qwen MoE", "qwen2_moe", "Qwen2-MoE", "Qwen2MoeForCausalLM"])
def test_names_of_qwen(written: str, models: Models) -> None:
    base = models.dense("qwen2")
    assert planned(recipe(base, architecture=written, shared_experts=[{"source_model": str(base)}])) == "qwen2_moe"


@pytest.mark.parametrize("written", ["qwen3 moe", "qwen3", "qwen3_moe"])
def test_names_of_qwen3(written: str, models: Models) -> None:
    assert planned(recipe(models.dense("qwen3"), architecture=written)) == "qwen3_moe"


def test_those_with_routers_of_sigmoids_say_so() -> None:
    assert [layout.name for layout in LAYOUTS if layout.sigmoid] == [
        layout.name for layout in LAYOUTS if "sigmoid" in layout.routing
    ]


def test_a_router_of_sigmoids_has_short_rows(models: Models, tmp_path: Path) -> None:
    make_mixture(recipe(models.dense("llama"), architecture="glm4_moe"), tmp_path / "out")
    tensors = load_tensors(tmp_path / "out")
    lengths = torch.stack([t.norm(dim=-1) for name, t in tensors.items() if name.endswith("mlp.gate.weight")])
    assert 0.98 < float(lengths.max()) < 1.02


def test_the_correction_of_scores_is_float32(models: Models, tmp_path: Path) -> None:
    make_mixture(recipe(models.dense("llama"), architecture="glm4_moe", dtype="float16"), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.1.mlp.gate.e_score_correction_bias").get_dtype() == "F32"
        assert file.get_slice("model.layers.1.mlp.gate.weight").get_dtype() == "F16"


def test_what_is_left_out_is_listed(models: Models, tmp_path: Path) -> None:
    other = models.dense("llama", seed=1)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    base = edit_tensors(models.dense("llama"), tmp_path / "base", lambda tensors: tensors.update({buffer: torch.ones(4)}))
    source = recipe(base)
    source["experts"] = [{"source_model": str(other)}] * 2
    with prepare_moe(source) as prepared:
        plan = prepared.plan
        reasons = {(plan.models[d.model].ref, d.tensor): d.reason for d in plan.dropped}
        inputs = {(plan.models[i.model].ref, i.tensor) for step in plan.steps for i in step.reads if i.model >= 0}
        everything = {(c.ref, tensor) for c in prepared.inputs for tensor in c.specs}
    assert reasons.keys() | inputs == everything
    assert not reasons.keys() & inputs
    assert reasons[str(base), "model.layers.0.mlp.down_proj.weight"] == "replaced by the experts"
    assert reasons[str(base), buffer] == "models compute it themselves"
    assert reasons[str(other), "lm_head.weight"] == "only the MLPs of this model are used"
