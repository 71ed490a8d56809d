"""Experts that are not what their donors are: noise, neurons drawn anew, factors, virtual groups; the recipes for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
import yaml

import weightsmith
from tests.cli_help import check_killed_and_resumed
from tests.kernels import reference
from tests.mini import as_bytes, write_checkpoint
from weightsmith._base.errors import PlanError
from weightsmith._kernels.randomness import log, normal

BF16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, INNER, VOCAB, LAYERS, HEADS = 32, 96, 40, 2, 4
NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
PRESETS = sorted((Path(__file__).parents[3] / "examples" / "recipes" / "moe").glob("*.yml"))
SETTINGS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
Tensors = dict[str, np.ndarray]


def dense(folder: Path, dtype: Any = np.float32, *, seed: int = 0, inner: int = INNER, fused: bool = False) -> Path:
    """A small Llama; fused: gate and up are one tensor."""
    rng = np.random.default_rng(seed)

    def new(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.3).astype(dtype)

    tensors = {f"{name}.weight": new(VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = new(HIDDEN)
    for i in range(LAYERS):
        layer = {f"self_attn.{p}_proj.weight": new(HIDDEN, HIDDEN) for p in "qkvo"}
        layer |= {f"mlp.{p}_proj.weight": new(inner, HIDDEN) for p in ("gate", "up")}
        layer |= {"mlp.down_proj.weight": new(HIDDEN, inner)}
        layer |= {f"{name}_layernorm.weight": new(HIDDEN) for name in ("input", "post_attention")}
        if fused:
            layer["mlp.gate_up_proj.weight"] = np.concatenate([layer.pop(f"mlp.{p}_proj.weight") for p in ("gate", "up")])
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return write_checkpoint(folder, tensors, {**SETTINGS, "intermediate_size": inner})


def recipe(model: Path, experts: int = 2, *, architecture: str = "mixtral", **keys: Any) -> dict[str, Any]:
    top = {key: keys.pop(key) for key in ("virtual_groups", "experts_per_token", "router_scale", "dtype") if key in keys}
    entry = {"source_model": str(model), "copies": experts, **keys}
    return {"base_model": str(model), "experts": [entry], "gate_mode": "random", "architecture": architecture, **top}


def read(folder: Path) -> Tensors:
    with weightsmith.open_checkpoint(folder) as model:
        return {name: model.read(name) for name in model.specs}


def upcycled(source: dict[str, Any], out: Path, **options: Any) -> Tensors:
    weightsmith.moe(source, out, fsync=False, **options)
    return read(out)


def expert(tensors: Tensors, layer: int, e: int, part: str) -> np.ndarray:
    """One matrix of one expert, of Mixtral's or Granite's layout."""
    prefix = f"model.layers.{layer}.block_sparse_moe."
    if f"{prefix}output_linear.weight" not in tensors:
        return tensors[f"{prefix}experts.{e}.{NAMES[part]}.weight"]
    if part == "down":
        return tensors[f"{prefix}output_linear.weight"][e]
    both = tensors[f"{prefix}input_linear.weight"][e]
    return both[: len(both) // 2] if part == "gate" else both[len(both) // 2 :]


def all_of(tensors: Tensors, count: int) -> dict[tuple[int, int, str], np.ndarray]:
    return {(i, e, part): expert(tensors, i, e, part) for i in range(LAYERS) for e in range(count) for part in NAMES}


def donor_part(donor: Tensors, layer: int, part: str) -> np.ndarray:
    return donor[f"model.layers.{layer}.mlp.{part}_proj.weight"]


# ---- the normal numbers


def test_normal_numbers_are_the_inverse_of_the_distribution_function() -> None:
    words = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, *np.random.default_rng(0).integers(0, 2**32, 20_000)]
    exact = [NormalDist().inv_cdf((float(word) + 0.5) / 2**32) for word in words]
    np.testing.assert_allclose([normal(np.uint32(word)) for word in words], exact, rtol=1e-14, atol=1e-15)


def test_the_logarithm() -> None:
    x = np.exp(np.random.default_rng(0).uniform(-25, 3, 5_000))
    np.testing.assert_allclose([log(v) for v in x], np.log(x), rtol=1e-15)


# ---- noise


def test_noise_is_that_of_the_seed_the_layer_the_expert_and_the_part(tmp_path: Path) -> None:
    """Element by element, by the slow reference of Philox and Python's own inverse."""
    donor = read(dense(tmp_path / "a"))
    tensors = upcycled(recipe(tmp_path / "a", noise_scale=0.02), tmp_path / "out", seed=7)
    for (i, e, part), matrix in all_of(tensors, 2).items():
        key = xxhash.xxh3_64_intdigest(f"model.layers.{i}.expert {e}\0{part}\0noise".encode(), 7)
        plain = donor_part(donor, i, part).reshape(-1)
        for k in (0, 1, 63, 64, 300, 2999, plain.size - 1):
            z = NormalDist().inv_cdf((reference.philox(key, k) + 0.5) / 2**32)
            assert matrix.reshape(-1)[k] == pytest.approx(float(plain[k]) + 0.02 * z, rel=1e-6, abs=1e-8)


def test_noise_is_normal_and_each_expert_has_its_own(tmp_path: Path) -> None:
    donor = read(dense(tmp_path / "a"))
    matrices = all_of(upcycled(recipe(tmp_path / "a", noise_scale=0.02), tmp_path / "out"), 2)
    noise = {(i, e, p): (m.astype(np.float64) - donor_part(donor, i, p)).reshape(-1) for (i, e, p), m in matrices.items()}
    together = np.concatenate(list(noise.values())) / 0.02
    n = together.size
    assert abs(together.mean()) < 4 / n**0.5
    assert abs(together.std() - 1) < 4 / (2 * n) ** 0.5
    assert abs((together**4).mean() - 3) < 4 * (96 / n) ** 0.5
    kept = list(noise.values())
    for k, a in enumerate(kept):
        for b in kept[:k]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / a.size**0.5


@pytest.mark.long
def test_only_the_experts_change(tmp_path: Path) -> None:
    donor = read(dense(tmp_path / "a", BF16))
    changes = {"noise_scale": 0.02, "drop_fraction": 0.5, "residual_scale": 0.5}
    written = upcycled(recipe(tmp_path / "a", **changes), tmp_path / "out")
    for name, tensor in donor.items():
        if ".mlp." not in name:
            assert as_bytes(written[name]) == as_bytes(tensor)


def test_a_fraction_of_the_elements_gets_noise_and_the_rest_keeps_its_bytes(tmp_path: Path) -> None:
    donor = read(dense(tmp_path / "a", BF16))
    tensors = upcycled(recipe(tmp_path / "a", noise_scale=0.5, noise_fraction=0.25), tmp_path / "out")
    changed = [m.view(np.uint16) != donor_part(donor, i, p).view(np.uint16) for (i, _, p), m in all_of(tensors, 2).items()]
    n = sum(c.size for c in changed)
    assert abs(sum(int(c.sum()) for c in changed) / n - 0.25) < 5 * (0.25 * 0.75 / n) ** 0.5
    assert (changed[0] != changed[3]).any()


@pytest.mark.slow
def test_residual_scale_is_a_factor_on_down_after_the_noise(tmp_path: Path) -> None:
    donor = read(dense(tmp_path / "a"))
    noisy = upcycled(recipe(tmp_path / "a", noise_scale=0.02), tmp_path / "noisy")
    both = upcycled(recipe(tmp_path / "a", noise_scale=0.02, residual_scale=0.25), tmp_path / "both")
    scaled = upcycled(recipe(tmp_path / "a", residual_scale=-3), tmp_path / "scaled")
    for (i, e, part), matrix in all_of(both, 2).items():
        factor = 0.25 if part == "down" else 1.0
        np.testing.assert_allclose(matrix, factor * expert(noisy, i, e, part), rtol=1e-6)
        plain = donor_part(donor, i, part)
        assert as_bytes(expert(scaled, i, e, part)) == as_bytes(plain * np.float32(-3 if part == "down" else 1))


# ---- neurons drawn anew


@pytest.mark.parametrize("fraction", [0.5, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_neurons_are_drawn_anew_in_all_three_matrices_alike(fraction: float, dtype: Any, tmp_path: Path) -> None:
    donor = read(dense(tmp_path / "a", dtype))
    tensors = upcycled(recipe(tmp_path / "a", drop_fraction=fraction), tmp_path / "out")
    sets = set()
    for i in range(LAYERS):
        for e in range(2):
            sizes = []
            chosen = []
            for part in NAMES:
                matrix, plain = expert(tensors, i, e, part), donor_part(donor, i, part)
                rows, before = (matrix.T, plain.T) if part == "down" else (matrix, plain)
                changed = (rows != before).any(axis=1)
                chosen.append(tuple(np.flatnonzero(changed)))
                assert as_bytes(rows[~changed]) == as_bytes(before[~changed])
                new, old = rows[changed].astype(np.float64), before[changed].astype(np.float64)
                n = new.size
                assert abs(new.mean() - old.mean()) < 5 * old.std() / n**0.5
                assert abs(new.std() / old.std() - 1) < 5 / (2 * n) ** 0.5
                assert abs(np.corrcoef(new.reshape(-1), old.reshape(-1))[0, 1]) < 5 / n**0.5
                sizes.append(int(changed.sum()))
            assert sizes == [round(fraction * INNER)] * 3
            assert chosen[0] == chosen[1] == chosen[2]
            sets.add(chosen[0])
    assert len(sets) == (2 * LAYERS if fraction < 1 else 1)


def test_the_deviation_is_that_of_the_replaced_elements_alone(tmp_path: Path) -> None:
    """A donor whose neurons differ in size: what is drawn is as wide as what it replaces, not as the whole."""
    tensors = read(dense(tmp_path / "plain"))
    for name, tensor in tensors.items():
        if re.search("gate|up", name):
            tensor[:, :] = np.arange(1, INNER + 1)[:, None] * np.where(np.arange(HIDDEN) % 2, 1, -1) * 0.01 + 0.2
    model = write_checkpoint(tmp_path / "a", tensors, SETTINGS)
    written = upcycled(recipe(model, drop_fraction=0.1), tmp_path / "out")
    for part in ("gate", "up"):
        matrix, plain = expert(written, 1, 1, part), donor_part(tensors, 1, part)
        changed = (matrix != plain).any(axis=1)
        new, old = matrix[changed].astype(np.float64), plain[changed].astype(np.float64)
        z = (new - old.mean()) / old.std()
        keys = xxhash.xxh3_64_intdigest(f"model.layers.1.expert 1\0{part}\0redrawn".encode(), 0)
        flat = np.flatnonzero(np.repeat(changed, HIDDEN))
        exact = [NormalDist().inv_cdf((reference.philox(keys, int(k)) + 0.5) / 2**32) for k in flat[:100]]
        np.testing.assert_allclose(z.reshape(-1)[:100], exact, rtol=1e-4, atol=1e-5)


# ---- whatever the layout and the donor's form


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"noise_scale": 0.1, "noise_fraction": 0.5, "residual_scale": 2}, {"drop_fraction": 0.5}])
@pytest.mark.parametrize("groups", [1, 4])
def test_fused_donors_and_fused_layouts_hold_the_same_numbers(changes: dict[str, Any], groups: int, tmp_path: Path) -> None:
    options = {**changes, "virtual_groups": groups, "experts_per_token": groups}
    plain, fused = dense(tmp_path / "a", BF16), dense(tmp_path / "b", BF16, fused=True)
    one = all_of(upcycled(recipe(plain, **options), tmp_path / "1"), 2 * groups)
    for k, (model, architecture) in enumerate([(fused, "mixtral"), (plain, "granitemoe"), (fused, "granitemoe")]):
        other = all_of(upcycled(recipe(model, architecture=architecture, **options), tmp_path / f"x{k}"), 2 * groups)
        assert {key: as_bytes(m) for key, m in one.items()} == {key: as_bytes(m) for key, m in other.items()}


@pytest.mark.matrix
@pytest.mark.slow
def test_bytes_do_not_depend_on_threads_or_memory(tmp_path: Path) -> None:
    model = dense(tmp_path / "a", BF16, inner=20_000)
    source = recipe(model, noise_scale=0.1, drop_fraction=0.3, residual_scale=0.5, architecture="granitemoe")
    files = set()
    for threads, memory in ((1, None), (3, None), (2, 190_000_000)):
        out = tmp_path / f"{threads}"
        weightsmith.moe(source, out, threads=threads, max_memory_bytes=memory, fsync=False)
        files.add((out / "model.safetensors").read_bytes())
    assert len(files) == 1
    assert upcycled(source, tmp_path / "other", seed=1).keys()
    assert (tmp_path / "other/model.safetensors").read_bytes() not in files


@pytest.mark.matrix
@pytest.mark.slow
def test_interrupted_work_goes_on(tmp_path: Path) -> None:
    source = recipe(dense(tmp_path / "a", BF16, inner=30_000), noise_scale=0.1, drop_fraction=0.5)
    check_killed_and_resumed(source, tmp_path, after=12)


# ---- virtual groups


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("architecture", "groups", "chosen", "dtype"),
    [
        ("mixtral", 2, 2, "float32"),
        ("mixtral", 4, 8, "float32"),
        ("granitemoe", 3, 3, "float32"),
        ("glm4_moe", 4, 4, "bfloat16"),
    ],
)
def test_virtual_groups_begin_as_the_dense_model(
    architecture: str, groups: int, chosen: int, dtype: str, tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    model = dense(tmp_path / "a", BF16 if dtype == "bfloat16" else np.float32)
    source = recipe(model, 3, architecture=architecture, virtual_groups=groups, experts_per_token=chosen)
    tensors = upcycled(source, tmp_path / "out")
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    both = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits.detach()
        for folder in (tmp_path / "a", tmp_path / "out")
    ]
    torch.testing.assert_close(both[1], both[0], rtol=1e-5, atol=1e-5)
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert said.get("moe_intermediate_size", said["intermediate_size"]) == INNER // groups
    assert 3 * groups in said.values()
    router = next(t for name, t in tensors.items() if t.shape == (3 * groups, HIDDEN) and "layers.1." in name)
    for k in range(3):
        assert len({as_bytes(row) for row in router[groups * k : groups * (k + 1)]}) == 1
    assert len({as_bytes(row) for row in router}) == 3


def test_a_group_holds_each_shard_once(tmp_path: Path) -> None:
    donor = read(dense(tmp_path / "a"))
    tensors = upcycled(recipe(tmp_path / "a", virtual_groups=4, experts_per_token=4), tmp_path / "out")
    for i in range(LAYERS):
        for k in range(2):
            group = range(4 * k, 4 * k + 4)
            for part in ("gate", "up"):
                whole = np.concatenate([expert(tensors, i, e, part) for e in group])
                assert as_bytes(whole) == as_bytes(donor_part(donor, i, part))
            whole = np.concatenate([expert(tensors, i, e, "down") for e in group], axis=1)
            assert as_bytes(whole) == as_bytes(4 * donor_part(donor, i, "down"))


# ---- entries


def test_copies_are_the_entry_repeated(tmp_path: Path) -> None:
    model = dense(tmp_path / "a")
    entry = {"source_model": str(model), "noise_scale": 0.1}
    one = upcycled({**recipe(model), "experts": [entry] * 3}, tmp_path / "one")
    two = upcycled({**recipe(model), "experts": [{**entry, "copies": 2}, entry]}, tmp_path / "two")
    assert {n: as_bytes(t) for n, t in one.items()} == {n: as_bytes(t) for n, t in two.items()}


@pytest.mark.slow
def test_an_expert_with_an_adapter_is_the_expert_with_the_adapter_baked_in(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    module = "base_model.model.model.layers.1.mlp.down_proj"
    factors = {
        f"{module}.lora_A.weight": rng.standard_normal((2, INNER)),
        f"{module}.lora_B.weight": rng.standard_normal((HIDDEN, 2)),
    }
    lora = write_checkpoint(tmp_path / "lora", {n: a.astype(np.float32) for n, a in factors.items()})
    (lora / "model.safetensors").rename(lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 1}')
    other = Path(str(lora).replace("lora", "lora2"))
    other.mkdir()
    for file in lora.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    model = dense(tmp_path / "a", BF16)
    both = f"{model}+{lora}"
    weightsmith.merge({"merge_method": "passthrough", "models": [{"model": both}]}, tmp_path / "baked", fsync=False)
    named = [both, str(model), f"{model}+{other}"]
    source = {**recipe(model), "base_model": both, "experts": [{"source_model": ref} for ref in named]}
    tensors, baked = upcycled(source, tmp_path / "out"), read(tmp_path / "baked")
    assert {t.dtype for t in tensors.values()} == {BF16}
    for e, donor in enumerate((baked, read(model), baked)):
        for i in range(LAYERS):
            for part in NAMES:
                assert as_bytes(expert(tensors, i, e, part)) == as_bytes(donor_part(donor, i, part))
    plan = json.loads((tmp_path / "out/weightsmith.json").read_text()) if (tmp_path / "out/weightsmith.json").exists() else None
    assert plan is None or both in json.dumps(plan)


# ---- what is refused


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"noise_fraction": 0.5}, "noise_fraction has no effect without noise_scale"),
        ({"noise_fraction": 1.5, "noise_scale": 1}, "'noise_fraction' takes a number from 0 to 1"),
        ({"drop_fraction": -0.1}, "'drop_fraction' takes a number from 0 to 1"),
        ({"experts": 2000}, "'copies' takes a whole number from 1 to 1024"),
        ({"virtual_groups": 4, "experts_per_token": 2}, "experts_per_token is 2, not a multiple of virtual_groups, 4"),
        ({"virtual_groups": 5, "experts_per_token": 5}, "an MLP of 96 neurons cannot be split into 5 equal parts"),
        ({"virtual_groups": 2, "experts_per_token": 6}, "experts_per_token is 6, but there are 4"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = dense(tmp_path / "a")
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        weightsmith.moe(recipe(model, keys.pop("experts", 2), **keys), tmp_path / "out")
    assert len(caught.value.problems) == 1


def test_virtual_groups_and_shared_experts_do_not_go_together(tmp_path: Path) -> None:
    model = dense(tmp_path / "a")
    source = recipe(model, architecture="glm4_moe", virtual_groups=2, experts_per_token=2)
    with pytest.raises(PlanError, match="a shared expert would differ in size"):
        weightsmith.moe({**source, "shared_experts": [{"source_model": str(model)}]}, tmp_path / "out")


# ---- the recipes of the papers


def test_there_are_recipes() -> None:
    assert len(PRESETS) == 5


@pytest.mark.slow
@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_a_recipe_says_where_it_comes_from_and_makes_a_model(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = file.read_text()
    assert re.search(r"^# Source: .+\n?(# .+\n)*.*https://arxiv.org/abs/", text, re.MULTILINE)
    assert all(len(line) <= 128 for line in text.splitlines())
    names = dict.fromkeys(re.findall(r": (\./models/\w+)", text))
    donors = {name: read(dense(tmp_path / name, BF16, seed=k)) for k, name in enumerate(names)}
    monkeypatch.chdir(tmp_path)
    done = weightsmith.moe(file, "out", fsync=False)
    assert done.warnings == ()
    tensors, written = read(tmp_path / "out"), yaml.safe_load(text)
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"].astype(np.float64)
    assert router.std() == pytest.approx(0.02, rel=0.2)
    if file.stem == "branch_train_mix":
        name = "model.layers.1.self_attn.k_proj.weight"
        mean = np.mean([donor[name].astype(np.float64) for donor in donors.values()], axis=0)
        np.testing.assert_allclose(tensors[name].astype(np.float64), mean, rtol=2**-8, atol=1e-6)
        for e, donor in enumerate(donors.values()):
            assert as_bytes(expert(tensors, 1, e, "up")) == as_bytes(donor_part(donor, 1, "up"))
        return
    (donor,) = donors.values()
    assert router.shape[0] == 8 * written.get("virtual_groups", 1)
    assert as_bytes(tensors["model.norm.weight"]) == as_bytes(donor["model.norm.weight"])
    if file.stem in ("noise_upcycling", "drop_upcycling"):
        changed = expert(tensors, 1, 3, "gate") != donor_part(donor, 1, "gate")
        assert 0.3 < changed.mean() < 0.6
