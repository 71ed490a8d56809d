"""Hidden states layer by layer are those of transformers' own forward, in the memory of one layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from tests import zoo
from tests.cli_help import run_process
from tests.context_help import context_of
from tests.mini import write_checkpoint
from tests.zoo import HEADS, SIZES
from weightsmith._activations.decoder import Base
from weightsmith._activations.decoder.forward import Decoder, _Bfloat16, _Memory, build, narrow_linears
from weightsmith._base.errors import Unsupported, WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._features.mixture.assembly import Assembly, Dense, Donor, dense_parts
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import assemble
from weightsmith._plans import Provenance
from weightsmith.abc.product import Cancelled, SomeRows

SLIDING = {"sliding_window": 4}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2 with some layers sliding": lambda: transformers.Qwen2Config(
        **SIZES, **SLIDING, use_sliding_window=True, max_window_layers=1
    ),
    "mistral with a sliding window": lambda: transformers.MistralConfig(**SIZES, **SLIDING),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS),
    "phi3, fused": lambda: transformers.Phi3Config(**SIZES),
    "gemma2, scaled embedding": lambda: transformers.Gemma2Config(**HEADS, **SLIDING),
}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [4], [20, 21, 22, 23, 24, 0, 1], [60, 3, 3, 3, 3, 3, 3, 2]]


def save_model(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


@contextmanager
def donor_of(folder: Path) -> Iterator[tuple[Donor, Assembly]]:
    with open_checkpoint(folder) as checkpoint:
        assembly = Assembly(Provenance("test"))
        yield assembly.checkpoint(checkpoint, "base"), assembly


def decoder_of(donor: Donor) -> Decoder:
    dense = dense_parts(donor)
    assert isinstance(dense, Dense)
    base = Base("base", 0, dict(donor.config), dense.prefix, len(dense.layers), dense.hidden)
    decoder = build(base, {name: step.out for name, step in donor.steps.items()})
    assert isinstance(decoder, Decoder), decoder
    return decoder


def whole_forward(folder: Path) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Of each prompt alone: the hidden states entering each layer, and the input of each MLP; by transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0]))
    forwards = []
    for ids in PROMPTS:
        seen.clear()
        with torch.inference_mode():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[:-1]
        forwards.append(([state[0] for state in states], list(seen)))
    return forwards


@pytest.mark.matrix("llama*", "gemma3*")
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_states_are_those_of_the_whole_forward_however_prompts_are_batched(tmp_path: Path, name: str) -> None:
    expected = whole_forward(save_model(tmp_path / "m", CONFIGS[name]()))
    with donor_of(tmp_path / "m") as (donor, assembly):
        for batch_tokens in (1, 20, 1000):  # one by one; two or three together, padded; all together
            decoder = decoder_of(donor)
            layers = 0
            for states in decoder.states(context_of(donor, assembly), PROMPTS, batch_tokens=batch_tokens):
                assert states.index == layers
                layers += 1
                for k, (entering, mlp_input) in enumerate(expected):
                    torch.testing.assert_close(states.entering[k], entering[states.index], rtol=1e-5, atol=5e-6)
                    torch.testing.assert_close(states.mlp_input[k], mlp_input[states.index], rtol=1e-5, atol=5e-6)
            assert layers == SIZES["num_hidden_layers"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_all_layers_share_the_memory_of_one(tmp_path: Path, device: str) -> None:
    save_model(tmp_path / "m", CONFIGS["llama"]())
    with donor_of(tmp_path / "m") as (donor, assembly):
        memory = _Memory(context_of(donor, assembly), device)
        addresses = set()
        for i in range(2):
            name = f"model.layers.{i}.mlp.up_proj.weight"
            filled = memory.filled({name: donor.steps[name].out.shape})
            addresses.add(filled[name].data_ptr())
            memory.free(filled.values())
    assert len(addresses) == 1


@pytest.mark.slow
def test_one_decoder_can_be_run_twice(tmp_path: Path) -> None:
    save_model(tmp_path / "m", CONFIGS["llama"]())
    with donor_of(tmp_path / "m") as (donor, assembly):
        decoder, source = decoder_of(donor), context_of(donor, assembly)
        first = [s.mlp_input[1] for s in decoder.states(source, PROMPTS)]
        second = [s.mlp_input[1] for s in decoder.states(source, PROMPTS)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_embeddings_are_the_rows_of_the_table(tmp_path: Path) -> None:
    save_model(tmp_path / "m", CONFIGS["llama"]())
    table = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).model.embed_tokens.weight
    with donor_of(tmp_path / "m") as (donor, assembly):
        embeddings = decoder_of(donor).embeddings(context_of(donor, assembly), PROMPTS)
    for ids, rows in zip(PROMPTS, embeddings, strict=True):
        assert torch.equal(rows, table[torch.tensor(ids)])


@pytest.mark.parametrize("step", [1, 7, 40, 1000])
def test_rows_are_found_however_their_bytes_come(step: int) -> None:
    table = np.random.default_rng(0).standard_normal((20, 13)).astype(ml_dtypes.bfloat16)
    numbers = [0, 3, 4, 11, 19]
    gathered = np.full((len(numbers), 13), np.nan, np.float32)
    rows = SomeRows(TensorSpec("t", DTYPES["BF16"], table.shape), np.array(numbers), gathered)
    data = table.reshape(-1).view(np.uint8)
    for start in range(0, data.size, 2 * step):
        rows.take(start, data[start : start + 2 * step])
    np.testing.assert_array_equal(gathered, table[numbers].astype(np.float32))


@pytest.mark.long
@pytest.mark.parametrize("merge", [{"density": 0.5}, {"density": 0.5, "scope": "model"}])
def test_a_base_that_is_merged_on_the_way_has_the_states_of_the_merge(tmp_path: Path, merge: dict[str, Any]) -> None:
    """`scope: model` must see all layers, though the engine makes one at a time."""
    from weightsmith._app.api import merge as run_merge

    for seed, name in enumerate("abc"):
        save_model(tmp_path / name, CONFIGS["llama"](), seed=seed)
    shared = {key: value for key, value in merge.items() if key == "scope"}
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 1, "density": 0.5}} for name in "bc"]
    recipe = {"merge_method": "ties", "base_model": str(tmp_path / "a"), "models": models, "parameters": shared}
    run_merge(recipe, tmp_path / "m")
    expected = whole_forward(tmp_path / "m")
    with closing(assemble(recipe, RecipeOptions())) as assembled:
        assembly = Assembly(Provenance("test"))
        donor = assembly.merge(assembled)
        for states in decoder_of(donor).states(context_of(donor, assembly), PROMPTS):
            for k, (_, mlp_input) in enumerate(expected):
                torch.testing.assert_close(states.mlp_input[k], mlp_input[states.index], rtol=1e-5, atol=5e-6)


@pytest.mark.long
def test_a_merge_on_the_way_can_be_stopped(tmp_path: Path) -> None:
    """Also while the whole model is looked at, for `scope: model`."""
    for seed, name in enumerate("ab"):
        save_model(tmp_path / name, CONFIGS["llama"](), seed=seed)
    models = [{"model": str(tmp_path / "b"), "parameters": {"weight": 1, "density": 0.5}}]
    recipe = {"merge_method": "ties", "base_model": str(tmp_path / "a"), "models": models, "parameters": {"scope": "model"}}

    def stop(now: object) -> None:
        raise KeyboardInterrupt

    with closing(assemble(recipe, RecipeOptions())) as assembled:
        assembly = Assembly(Provenance("test"))
        donor = assembly.merge(assembled)
        with pytest.raises(KeyboardInterrupt):
            context_of(donor, assembly, stop)
        context = context_of(donor, assembly, cancelled=True)
        with pytest.raises(Cancelled):
            context.rows("model.embed_tokens.weight", [0])


# ---- memory


LAYERS, HIDDEN, INTERMEDIATE = 12, 768, 3072

MEASURE = """
import sys
from pathlib import Path
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._features.mixture.assembly import Assembly
from tests.activations.test_decoder import context_of
from tests.activations.test_decoder import decoder_of
from weightsmith._plans import Provenance
import transformers.models.llama.modeling_llama

def peak():
    # Not ru_maxrss: a process begins with that of the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10

def run(folder):
    with open_checkpoint(Path(folder)) as checkpoint:
        assembly = Assembly(Provenance("test"))
        donor = assembly.checkpoint(checkpoint, "base")
        for states in decoder_of(donor).states(context_of(donor, assembly), [[1, 2, 3, 4], [5, 6]]):
            pass

run(sys.argv[1])   # a tiny model: all code is loaded and warm
before = peak()
run(sys.argv[2])
print(peak() - before)
"""


def write_large(folder: Path) -> int:
    """A Llama of random weights, without torch: its bytes."""
    rng = np.random.Generator(np.random.PCG64(0))

    def some(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": some(64, HIDDEN), "model.norm.weight": some(HIDDEN)}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        for part in "qkvo":
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = some(HIDDEN, HIDDEN)
        for part in ("gate", "up"):
            tensors[f"{prefix}mlp.{part}_proj.weight"] = some(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = some(HIDDEN, INTERMEDIATE)
        tensors[f"{prefix}input_layernorm.weight"] = some(HIDDEN)
        tensors[f"{prefix}post_attention_layernorm.weight"] = some(HIDDEN)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 64, "vocab_size": 64}
    write_checkpoint(folder, tensors, {"model_type": "llama", **sizes, **heads, "tie_word_embeddings": True})
    return sum(t.nbytes for t in tensors.values())


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_the_peak_of_memory_is_a_layer_and_not_the_model(tmp_path: Path) -> None:
    nbytes = write_large(tmp_path / "large")
    assert nbytes > 220e6  # 450 MB in float32
    save_model(tmp_path / "small", CONFIGS["llama"]())
    ran = run_process(str(tmp_path / "small"), str(tmp_path / "large"), code=MEASURE)
    assert ran.code == 0, ran.err
    layer = 4 * (nbytes - 2 * 65 * HIDDEN) // (2 * LAYERS)  # in float32: 38 MB
    grown = int(ran.out)
    # In float32, and the engine's tiles.
    assert layer < grown < 2 * layer, (grown, layer)


# ---- models that transformers does not build


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_model"}, "transformers cannot build a model of type 'no_such_model'"),
        ({"num_hidden_layers": 3}, "the tensors do not match the model that transformers builds"),
        ({"num_attention_heads": 8}, "the tensors do not match the model that transformers builds"),
        ({"hidden_act": "no_such_function"}, "transformers cannot build a model of type 'llama'"),
    ],
)
def test_a_config_that_does_not_fit_is_one_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_model(tmp_path / "m", transformers.LlamaConfig(**{**SIZES, "head_dim": None}))
    config = json.loads((tmp_path / "m/config.json").read_text())
    config.pop("head_dim", None)
    (tmp_path / "m/config.json").write_text(json.dumps(config | change))
    with donor_of(tmp_path / "m") as (donor, _):
        dense = dense_parts(donor)
        assert isinstance(dense, Dense), dense
        base = Base("base", 0, dict(donor.config), dense.prefix, len(dense.layers), dense.hidden)
        error = build(base, {name: step.out for name, step in donor.steps.items()})
    assert isinstance(error, WeightsmithError)
    assert message in str(error)


@pytest.mark.parametrize("name", ["falcon-h1", "granite-hybrid"])
def test_infinity_as_transformers_writes_it(name: str) -> None:
    _, config_class, sizes = zoo.ZOO[name]
    stated = getattr(transformers, config_class)(**sizes, time_step_limit=[0.0, float("inf")])
    config = json.loads(stated.to_json_string(use_diff=False))
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    decoder = build(Base("base", 0, config, "model.layers.", config["num_hidden_layers"], config["hidden_size"]), {})
    assert isinstance(decoder, Decoder), decoder
    assert list(decoder._body.config.time_step_limit) == [0.0, float("inf")]


@pytest.mark.parametrize("key", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_layers_that_get_more_than_hidden_states_are_refused_by_name(tmp_path: Path, key: str) -> None:
    none = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64}
    config = transformers.Gemma4TextConfig(
        **{**HEADS, **none, key: 1, "layer_types": ["full_attention"] * HEADS["num_hidden_layers"]}
    )
    error = build(Base("base", 0, config.to_dict(), "model.", HEADS["num_hidden_layers"], HEADS["hidden_size"], "; or …"), {})
    assert isinstance(error, Unsupported)
    assert f"{key} 1" in error.finding.what
    assert error.finding.fix.startswith("Choose what needs no text; or …")


def test_linear_layers_are_narrowed_and_the_head_is_not() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval()
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        expected = model(ids).logits
        narrow_linears(model, model.get_output_embeddings())
        logits = model(ids).logits
    narrowed = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}
    assert narrowed == {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)} - {
        "lm_head.weight"
    }
    assert logits.dtype == torch.float32
    assert 0 < (logits - expected).abs().max() < 0.01 * expected.abs().max()


def test_a_layer_that_multiplies_in_bfloat16_notices_a_changed_weight() -> None:
    linear = torch.nn.Linear(8, 4).requires_grad_(False)
    multiply, x = _Bfloat16(linear), torch.ones(3, 8)
    for weight in (linear.weight.clone(), torch.rand(4, 8)):
        linear.weight.copy_(weight)
        expected = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()).float() + linear.bias
        assert torch.equal(multiply(x), expected)
        assert torch.equal(multiply(x), expected)


def test_a_kept_weight_in_bfloat16_does_not_hide_gradients() -> None:
    linear = torch.nn.Linear(8, 4, bias=False)
    multiply, x = _Bfloat16(linear), torch.rand(3, 8)
    with torch.no_grad():
        multiply(x)
    [gradient] = torch.autograd.grad(multiply(x).sum(), linear.weight)
    assert torch.equal(gradient, x.bfloat16().sum(0).float().expand(4, 8))
