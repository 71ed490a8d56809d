"""Megatron's checkpoints: slices and stages are joined as Megatron's converter joins them, and what is not known is refused."""

from __future__ import annotations

import argparse
import io
import random
import shutil
import signal
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightsmith
from tests.models.sources.test_pytorch import as_array
from weightsmith._base.errors import CheckpointError, FormatError, Unsupported
from weightsmith._files.hf_folder import natural_key
from weightsmith._models.checkpoint import open_checkpoint
from weightsmith._models.formats.training.megatron import open_files
from weightsmith.testing import SourceCase, SourceTests

State = dict[str, torch.Tensor]
ROWS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "word_embeddings.weight",
    "output_layer.weight",
)
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
LAYERS = "decoder.layers"


def model(layers: int = 4, *, gated: bool = True, seed: int = 0) -> State:
    """A whole model: what one process would have."""
    torch.manual_seed(seed)
    hidden, width = 8, 12

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    state = {
        "embedding.word_embeddings.weight": random_tensor(16, hidden),
        "embedding.position_embeddings.weight": random_tensor(5, hidden),
    }
    for i in range(layers):
        state |= {
            f"{LAYERS}.{i}.self_attention.linear_qkv.weight": random_tensor(16, hidden),
            f"{LAYERS}.{i}.self_attention.linear_qkv.bias": random_tensor(16),
            f"{LAYERS}.{i}.self_attention.linear_qkv.layer_norm_weight": random_tensor(hidden),
            f"{LAYERS}.{i}.self_attention.linear_proj.weight": random_tensor(hidden, 8),
            f"{LAYERS}.{i}.self_attention.linear_proj.bias": random_tensor(hidden),
            f"{LAYERS}.{i}.mlp.linear_fc1.weight": random_tensor(width * (1 + gated), hidden),
            f"{LAYERS}.{i}.mlp.linear_fc1.bias": random_tensor(width * (1 + gated)),
            f"{LAYERS}.{i}.mlp.linear_fc2.weight": random_tensor(hidden, width),
            f"{LAYERS}.{i}.mlp.linear_fc2.bias": random_tensor(hidden),
        }
    return {**state, "decoder.final_layernorm.weight": random_tensor(hidden), "output_layer.weight": random_tensor(16, hidden)}


def sliced(name: str, tensor: torch.Tensor, rank: int, slices: int, *, gated: bool) -> torch.Tensor:
    """What a rank has of a tensor, as Megatron's layers cut it."""
    if name.endswith(COLUMNS):
        return tensor.chunk(slices, 1)[rank]
    if not name.endswith(ROWS) or not tensor.dim():
        return tensor
    if gated and "linear_fc1" in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(slices)[rank], up.chunk(slices)[rank]])
    return tensor.chunk(slices)[rank]


def stage_of(state: State, numbers: list[int], *, first: bool, last: bool) -> State:
    """The tensors of some layers, numbered from 0, with what comes before the first and after the last."""
    part = {}
    for name, tensor in state.items():
        if name.startswith(LAYERS):
            number, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
            if int(number) in numbers:
                part[f"{LAYERS}.{numbers.index(int(number))}.{rest}"] = tensor
        elif (first and name.startswith("embedding")) or (last and not name.startswith("embedding")):
            part[name] = tensor
    return part


def write(
    folder: Path,
    state: State,
    slices: int = 2,
    stages: int = 1,
    virtual: int = 1,
    *,
    gated: bool = True,
    version: float | None = 3.0,
    **args: Any,
) -> Path:
    """A checkpoint as Megatron's processes save it."""
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith(LAYERS))
    chunks = [list(map(int, part)) for part in np.array_split(range(layers), stages * virtual)]
    args = {"num_layers": layers, "tensor_model_parallel_size": slices, "pipeline_model_parallel_size": stages, **args}
    for rank in range(slices):
        for stage in range(stages):
            entries: dict[str, Any] = {
                "args": argparse.Namespace(**args, params_dtype=torch.bfloat16, exit_signal=signal.SIGTERM),
                "iteration": 10,
            }
            entries |= {"checkpoint_version": version} if version is not None else {}
            for step in range(virtual):
                number = step * stages + stage
                part = stage_of(state, chunks[number], first=number == 0, last=number == len(chunks) - 1)
                cut = {n: sliced(n, t, rank, slices, gated=gated).clone() for n, t in part.items()}
                extra = {"decoder._extra_state": None, "decoder.layers.0.mlp._extra_state": io.BytesIO(b"settings")}
                entries["model" if virtual == 1 else f"model{step}"] = {**cut, **extra}
            entries["optimizer"] = {"state": {0: {"exp_avg": torch.zeros(3)}}}
            entries["rng_state"] = [{"random": random.getstate(), "numpy": np.random.get_state()}]  # noqa: NPY002  as Megatron does
            place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            place.mkdir(parents=True)
            torch.save(entries, place / "model_optim_rng.pt")
    return folder


def check(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    with open_checkpoint(folder) as opened:
        assert set(opened) == set(state)
        for name, tensor in state.items():
            np.testing.assert_array_equal(opened[name], as_array(tensor), name)


class TestMegatron(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        state = model(2)
        first, second = (
            write(tmp_path / "a", state),
            write(tmp_path / "b", model(2, seed=1) | {"extra.norm.weight": torch.ones(3)}),
        )
        expected = {name: as_array(tensor) for name, tensor in sorted(state.items(), key=lambda item: natural_key(item[0]))}

        def opener(folder: Path) -> Any:
            return lambda: open_files(sorted(folder.glob("*/*.pt")), None, "it").source

        return SourceCase(opener(first), expected, opener(second))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(("slices", "stages", "virtual"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)])
def test_slices_and_stages_are_one_model(slices: int, stages: int, virtual: int, gated: bool, tmp_path: Path) -> None:
    state = model(gated=gated)
    write(tmp_path / "run" / "iter_0000010", state, slices, stages, virtual, gated=gated)
    check(tmp_path / "run", state)
    check(tmp_path / "run" / "iter_0000010", state)


def test_stages_need_not_be_of_one_length(tmp_path: Path) -> None:
    state = model(5)
    check(write(tmp_path, state, 2, 3), state)


def test_older_models_have_dicts_in_dicts(tmp_path: Path) -> None:
    names = {
        "linear_qkv": "query_key_value",
        "linear_proj": "dense",
        "linear_fc1": "dense_h_to_4h",
        "linear_fc2": "dense_4h_to_h",
    }
    state, folder = model(2), write(tmp_path / "run", model(2))
    expected = {}
    for rank in range(2):
        path = folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        entries = torch.load(path, weights_only=False)
        encoder = {}
        for name, tensor in entries["model"].items():
            if name.startswith(LAYERS) and not name.endswith("_extra_state"):
                older = name.removeprefix("decoder.")
                for new, old in names.items():
                    older = older.replace(new, old)
                encoder[older.replace("query_key_value.layer_norm_weight", "input_norm.weight")] = tensor
                expected[
                    f"language_model.encoder.{older}".replace("query_key_value.layer_norm_weight", "input_norm.weight")
                ] = state[name]
        embedding = {"word_embeddings": {"weight": entries["model"]["embedding.word_embeddings.weight"]}}
        entries["model"] = {"language_model": {"embedding": embedding, "encoder": encoder}}
        torch.save(entries, path)
    expected["language_model.embedding.word_embeddings.weight"] = state["embedding.word_embeddings.weight"]
    check(folder, expected)


def test_the_head_of_a_tied_model_is_its_embedding(tmp_path: Path) -> None:
    state = model(2)
    state["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    write(tmp_path, state, 2, 2, untie_embeddings_and_output_weights=False)
    check(tmp_path, {name: tensor for name, tensor in state.items() if name != "output_layer.weight"})
    with open_checkpoint(tmp_path) as opened:
        assert "is tied to the embedding" in opened.notes[1].what


def test_a_tied_head_with_other_values_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, model(2), 2, 2, untie_embeddings_and_output_weights=False)
    with open_checkpoint(tmp_path) as opened, pytest.raises(FormatError, match="has other values than in"):
        opened.read("embedding.word_embeddings.weight")


def test_an_encoder_and_a_decoder_in_stages_are_refused(tmp_path: Path) -> None:
    write(tmp_path, model(4), 1, 2)
    for path in tmp_path.glob("*/*.pt"):
        entries = torch.load(path, weights_only=False)
        entries["model"] |= {n.replace("decoder", "encoder"): t for n, t in entries["model"].items() if n.startswith(LAYERS)}
        torch.save(entries, path)
    with pytest.raises(Unsupported, match="an encoder and a decoder in stages are not read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", [f"{LAYERS}.1.mlp.linear_fc2.bias", "decoder.final_layernorm.weight"])
def test_what_each_slice_has_must_be_the_same(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, model(2)) / "mp_rank_01" / "model_optim_rng.pt"
    entries = torch.load(path, weights_only=False)
    entries["model"][name][3] = 7
    torch.save(entries, path)
    with open_checkpoint(tmp_path) as opened, pytest.raises(FormatError, match="has other values than in"):
        opened.read(name)


def test_two_checkpoints_are_merged(tmp_path: Path) -> None:
    first, second = model(2), model(2, seed=1)
    write(tmp_path / "a", first, 2, 2)
    write(tmp_path / "b", second, 4, 1)
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in "ab"]
    weightsmith.merge({"merge_method": "linear", "models": models}, tmp_path / "out", progress=False, fsync=False)
    with weightsmith.open_checkpoint(tmp_path / "out") as merged:
        assert set(merged) == set(first)
        for name, tensor in first.items():
            mean = ((tensor.double() + second[name].double()) / 2).to(torch.bfloat16)
            np.testing.assert_array_equal(merged[name], as_array(mean), name)


# ---- what is refused


def _renamed(folder: Path, old: str, new: str) -> None:
    for path in folder.glob("*/*.pt"):
        entries = torch.load(path, weights_only=False)
        entries["model"] = {name.replace(old, new): tensor for name, tensor in entries["model"].items()}
        torch.save(entries, path)


CHANGES: dict[str, tuple[Any, type[CheckpointError], str]] = {
    "a file is missing": (
        lambda folder: shutil.rmtree(folder / "mp_rank_01"),
        FormatError,
        "files of 1 processes, .* in 2 slices",
    ),
    "unknown slices": (
        lambda folder: _renamed(folder, "linear_proj", "linear_mix"),
        Unsupported,
        "linear_mix.weight' are not joined: its slices may be joined in several ways",
    ),
    "no second layer": (
        lambda folder: _renamed(folder, "linear_fc2", "linear_fc7"),
        Unsupported,
        "linear_fc1.weight' are not joined: no second layer of its MLP tells whether it is gated",
    ),
    "unknown tensors": (
        lambda folder: _renamed(folder, "final_layernorm.weight", "experts.weight1"),
        Unsupported,
        "experts.weight1' are not joined",
    ),
    "no columns": (
        lambda folder: _renamed(folder, "linear_proj.bias", "dense.weight"),
        FormatError,
        r"dense.weight' is \[8\], and its slices are columns of a matrix",
    ),
    "a layer is missing": (
        lambda folder: _renamed(folder, f"{LAYERS}.0.", f"{LAYERS}.2."),
        FormatError,
        "the layers of a stage are '1', '2', not all from 0",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_and_other_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    change, kind, message = CHANGES[name]
    change(write(tmp_path, model(2)))
    with pytest.raises(kind, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"expert_model_parallel_size": 2}, FormatError, "'mp_rank_00' has 0 numbers after that of the slice"),
        ({"moe_mlp_glu_interleave_size": 32}, Unsupported, r"gate and up are interleaved \(moe_mlp_glu_interleave_size\)"),
        ({"version": 1.0}, Unsupported, "checkpoint_version 1 has another order"),
        ({"version": None}, Unsupported, "checkpoint_version 0 has another order"),
        ({"num_layers": 3}, FormatError, "the stages have 2 layers, and the run had 3"),
        ({"tensor_model_parallel_size": 4}, FormatError, "files of 2 processes, and the model is in 4 slices"),
    ],
)
def test_runs_with_other_settings_are_refused(
    settings: dict[str, Any], kind: type[CheckpointError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        open_checkpoint(write(tmp_path, model(2), **settings))


# ---- experts that are spread over processes, and multi-latent attention

EXPERTS = 6
STYLES = {"modules": "experts.local_experts.{}.{}.weight", "numbered": "experts.{1}.weight{0}"}


def mixture(style: str, layers: int = 2) -> State:
    """A whole model with experts, a router and shared experts in its last layers."""
    state = model(layers)
    for i in range(1, layers):
        prefix = f"{LAYERS}.{i}.mlp"
        state = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
        state |= {f"{prefix}.router.weight": torch.randn(EXPERTS, 8), f"{prefix}.shared_experts.gate_weight": torch.randn(1, 8)}
        state |= {f"{prefix}.shared_experts.linear_fc1.weight": torch.randn(16, 8)}
        state |= {f"{prefix}.shared_experts.linear_fc2.weight": torch.randn(8, 8)}
        for e in range(EXPERTS):
            state[f"{prefix}.{STYLES[style].format(e, 'linear_fc1')}"] = torch.randn(24, 8)
            state[f"{prefix}.{STYLES[style].format(e, 'linear_fc2')}"] = torch.randn(8, 12)
    return state


def spread(folder: Path, state: State, style: str, ranks: int, slices: int, stages: int, **args: Any) -> Path:
    """A checkpoint whose experts are spread over processes."""
    local = EXPERTS // ranks
    for rank in range(ranks):
        kept = {name: tensor for name, tensor in state.items() if ".mlp.experts." not in name}
        for name, tensor in state.items():
            if ".mlp.experts." not in name:
                continue
            prefix, _, rest = name.partition(".mlp.")
            last = "linear_fc1" if "linear_fc1" in rest else "linear_fc2"
            number = next(e for e in range(EXPERTS) if rest == STYLES[style].format(e, last))
            if number // local == rank:
                kept[f"{prefix}.mlp.{STYLES[style].format(number % local, last)}"] = tensor
        settings = {"expert_model_parallel_size": ranks, "num_experts": EXPERTS, **args}
        written = write(folder / f"of {rank}", kept, slices, stages, **settings)
        for place in sorted(written.iterdir()):
            shutil.move(place, folder / f"{place.name}_{rank:03d}")
        written.rmdir()
    return folder


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("ranks", "slices", "stages"), [(2, 1, 1), (3, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_experts_are_numbered_through_all_processes(
    style: str, ranks: int, slices: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROWS", (*ROWS, *(f"linear_fc1.weight{e}" for e in range(EXPERTS))))
    monkeypatch.setattr(f"{__name__}.COLUMNS", (*COLUMNS, *(f"linear_fc2.weight{e}" for e in range(EXPERTS))))
    state = mixture(style, 4)
    check(spread(tmp_path, state, style, ranks, slices, stages), state)


def test_processes_with_other_experts_must_agree_on_everything_else(tmp_path: Path) -> None:
    folder, name = spread(tmp_path, mixture("modules"), "modules", 2, 1, 1), f"{LAYERS}.1.mlp.router.weight"
    path = folder / "mp_rank_00_001" / "model_optim_rng.pt"
    entries = torch.load(path, weights_only=False)
    entries["model"][name][0] = 7
    torch.save(entries, path)
    with open_checkpoint(folder) as opened, pytest.raises(FormatError, match="has other values than in"):
        opened.read(name)


SPREAD: dict[str, tuple[Any, dict[str, Any], type[CheckpointError], str]] = {
    "a file is missing": (
        lambda folder: shutil.rmtree(folder / "mp_rank_00_001"),
        {},
        FormatError,
        "files of 1 processes, and the model is in 1 slices of 1 stages, for 2 groups of experts",
    ),
    "other numbers": (lambda folder: None, {"num_experts": 8}, FormatError, "the files have 6 experts, and the run had 8"),
    "slices of experts": (
        lambda folder: None,
        {"expert_tensor_parallel_size": 2},
        Unsupported,
        "experts have slices of their own",
    ),
    "one tensor": (
        lambda folder: _renamed(folder, "experts.local_experts.0.linear_fc1.weight", "experts.weight1"),
        {},
        Unsupported,
        "experts.weight1' are not joined: the experts of a process are one tensor",
    ),
    "a hole": (
        lambda folder: _renamed(folder, "local_experts.1.", "local_experts.5."),
        {},
        FormatError,
        "the files of a stage have different experts",
    ),
    "no experts by the run": (
        lambda folder: None,
        {"expert_model_parallel_size": 1},
        FormatError,
        "are not spread over processes|and the model is in 1 slices",
    ),
}


@pytest.mark.parametrize("name", SPREAD)
def test_experts_that_do_not_fit_together_are_refused(name: str, tmp_path: Path) -> None:
    change, settings, kind, message = SPREAD[name]
    change(spread(tmp_path, mixture("modules"), "modules", 2, 1, 1, **settings))
    with pytest.raises(kind, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("sliced_down", [False, True])
def test_the_ranks_of_latent_attention_tell_whether_it_is_sliced(
    sliced_down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
    rows = ("linear_q_up_proj.weight", "linear_kv_up_proj.weight", *(down if sliced_down else ()))
    monkeypatch.setattr(f"{__name__}.ROWS", (*ROWS, *rows))
    state = model(2)
    for i in range(2):
        attention = f"{LAYERS}.{i}.self_attention"
        state = {name: tensor for name, tensor in state.items() if not name.startswith(f"{attention}.linear_qkv")}
        shapes = {"linear_q_down_proj": (6, 8), "linear_kv_down_proj": (10, 8), "linear_q_up_proj": (12, 6)}
        shapes |= {"linear_kv_up_proj": (16, 6)}
        state |= {f"{attention}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        state |= {f"{attention}.linear_q_up_proj.layer_norm_weight": torch.randn(6)}
    ranks = {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_pos_emb_head_dim": 4}
    check(write(tmp_path / "a", state, 2, 1, **ranks), state)
    write(tmp_path / "b", state, 2, 1)
    with pytest.raises(Unsupported, match="the arguments of the run do not say whether these are all"):
        open_checkpoint(tmp_path / "b")


def test_a_huge_number_of_slices_costs_no_memory(tmp_path: Path) -> None:
    folder = write(tmp_path, model(1), tensor_model_parallel_size=300_000)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="the model is in 300,000 slices"):
            open_checkpoint(folder)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_one_slice_needs_no_rules(tmp_path: Path) -> None:
    state = model(2) | {"decoder.layers.0.mixer.in_proj.weight": torch.ones(3, 2)}
    check(write(tmp_path, state, 1, version=None), state)


def test_several_steps_in_one_folder_are_refused(tmp_path: Path) -> None:
    for step in ("iter_0000010", "iter_0000020"):
        write(tmp_path / step, model(1))
    with pytest.raises(FormatError, match="checkpoints of 'iter_0000010', 'iter_0000020' in one folder"):
        open_checkpoint(tmp_path)
