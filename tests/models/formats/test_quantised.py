"""Checkpoints of other quantisations as inputs: the numbers that come out, what is refused, and merges of them."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import weightsmith
from tests.fake_hub import COMMIT, serve, use
from tests.mini import write_checkpoint
from tests.models.formats import oracles
from tests.models.formats.quantised import (
    BF16,
    CASES,
    E4M3,
    Case,
    autoround,
    awq,
    bitnet,
    bnb4,
    bnb8,
    exl3,
    gptq,
    mlx,
    modelopt,
    torchao,
)
from weightsmith._base.errors import CheckpointError, FormatError, NonFinite, Unsupported, WeightsmithError
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint
from weightsmith._models.formats import decoded
from weightsmith.abc.tensors import read
from weightsmith.testing import SourceCase, SourceTests

ORACLES = json.loads(oracles.FILE.read_text())


def opened(folder: Path, case: Case) -> Checkpoint:
    return open_checkpoint(write_checkpoint(folder, case.tensors, case.config))


def joined(*cases: Case) -> Case:
    """One checkpoint of several; the config of the first."""
    return replace(
        cases[0],
        tensors={name: a for case in cases for name, a in case.tensors.items()},
        plain={name: a for case in cases for name, a in case.plain.items()},
    )


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_other_programs_decode(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    with opened(tmp_path, case) as checkpoint:
        for tensor, plain in case.plain.items():
            values = checkpoint.read(tensor)
            np.testing.assert_array_equal(values, plain)
            assert checkpoint.natural_dtype(tensor).numpy == case.kept
        assert list(checkpoint.specs) == sorted(
            {*case.plain, *(n for n in case.tensors if n.endswith((".bias", "norm.weight")))}
        )
        assert checkpoint.config is not None
        assert "quantization_config" not in checkpoint.config
        assert "quantization" not in checkpoint.config
        assert checkpoint.quantised is None
    oracle = ORACLES[name]
    if "sha256" in oracle:
        assert oracles.digest(values.astype(oracle["dtype"])) == oracle["sha256"]
    else:
        assert np.abs(np.array(oracles.samples(values)) - oracle["samples"]).max() < oracles.TOLERANCE * np.abs(values).max()


# ---- damaged and unsupported checkpoints


def changed(case: Case, tensors: Mapping[str, np.ndarray | None] | None = None, **entry: Any) -> Case:
    """The case with some tensors replaced (None removes one), and some values of its entry in config.json."""
    kept = {name: a for name, a in {**case.tensors, **(tensors or {})}.items() if a is not None}
    entries = {key: {**old, **entry} for key, old in case.config.items() if key.startswith("quantization")}
    return replace(case, tensors=kept, config={**case.config, **entries})


def state(case: Case, **values: Any) -> dict[str, np.ndarray]:
    """The JSON of a bitsandbytes weight, with some values changed."""
    name = next(name for name in case.tensors if "quant_state" in name)
    settings = {**json.loads(case.tensors[name].tobytes()), **values}
    return {name: np.frombuffer(json.dumps(settings).encode(), np.uint8)}


GPTQ, ORDERED, AWQ = gptq((64, 96)), gptq((64, 96), desc_act=True), awq((64, 96))
EXL3 = exl3((128, 256))
MLX, MXFP4 = mlx((48, 128)), mlx((48, 128), mode="mxfp4", group_size=32)
NVFP4 = modelopt((8, 32))
NF4, NESTED, INT8 = bnb4((8, 64)), bnb4((8, 64), nested=True), bnb8((8, 16))
BITNET = bitnet((8, 16))
TORCHAO, _TORCHAO = torchao((8, 16), grid=(8, 1)), "q_proj._weight_"
_STATE = "q.weight.quant_state.bitsandbytes__nf4"
_F32 = np.float32

REFUSED: dict[str, tuple[Case, type[WeightsmithError], str]] = {
    "bnb: no table": (changed(NF4, {"q.weight.quant_map": None}), FormatError, "'q.weight.quant_map' is missing"),
    "bnb: short table": (changed(NF4, {"q.weight.quant_map": np.ones(8, _F32)}), FormatError, r"is \[8\], .* require \[16\]"),
    "bnb: no codes": (changed(NF4, {"q.weight": None}), FormatError, "'q.weight' is missing"),
    "bnb: few codes": (changed(NF4, {"q.weight": np.ones((9, 1), np.uint8)}), FormatError, "has 9 bytes, .* needs 256"),
    "bnb: few scales": (changed(NF4, {"q.weight.absmax": np.ones(7, _F32)}), FormatError, r"is \[7\], .* require \[8\]"),
    "bnb: integer scales": (changed(NF4, {"q.weight.absmax": np.ones(8, np.uint8)}), Unsupported, "is U8, and only F32"),
    "bnb: other type": (changed(NF4, state(NF4, quant_type="int4")), Unsupported, "quant_type 'int4'"),
    "bnb: shape of text": (changed(NF4, state(NF4, shape="8x64")), FormatError, "shape in .* is '8x64', not two whole"),
    "bnb: negative shape": (changed(NF4, state(NF4, shape=[-8, -64])), FormatError, "not two whole numbers"),
    "bnb: huge shape": (changed(NF4, state(NF4, shape=[10**200, 2])), FormatError, "has 256 bytes, and a weight"),
    "bnb: boolean shape": (changed(NF4, state(NF4, shape=[True, 512])), FormatError, "not two whole numbers"),
    "bnb: no block": (changed(NF4, state(NF4, blocksize=0)), FormatError, "blocksize in .* is 0, not a whole number"),
    "bnb: block of text": (changed(NF4, state(NF4, blocksize="64")), FormatError, "blocksize in .* is '64'"),
    "bnb: other dtype": (changed(NF4, state(NF4, dtype="float8_e4m3fn")), FormatError, "dtype in .* is 'float8_e4m3fn'"),
    "bnb: no JSON": (changed(NF4, {_STATE: np.ones(9, np.uint8)}), FormatError, "quant_state.bitsandbytes__nf4' is not JSON"),
    "bnb: a list": (changed(NF4, {_STATE: np.frombuffer(b"[1]", np.uint8)}), FormatError, "is not a JSON object but"),
    "bnb: long JSON": (changed(NF4, {_STATE: np.ones(1 << 17, np.uint8)}), FormatError, "not the bytes of a short JSON text"),
    "bnb: offset of text": (changed(NESTED, state(NESTED, nested_offset="x")), FormatError, "nested_offset in .* is 'x'"),
    "bnb: infinite offset": (changed(NESTED, state(NESTED, nested_offset=1e39)), FormatError, "nested_offset in .* is 1e"),
    "bnb: nested block": (changed(NESTED, state(NESTED, nested_blocksize=-1)), FormatError, "nested_blocksize in .* is -1"),
    "bnb: two entries": (
        replace(NF4, config={**NF4.config, "text_config": {"quantization_config": {"quant_method": "gptq"}}}),
        Unsupported,
        "say different things",
    ),
    "bnb: transposed model": (replace(NF4, config={**NF4.config, "model_type": "gpt2"}), Unsupported, r"\[inputs, outputs\]"),
    "bitnet: rounded while it runs": (changed(BITNET, quantization_mode="online"), Unsupported, "quantization_mode 'online'"),
    "bitnet: norms in layers": (changed(BITNET, use_rms_norm=True), Unsupported, "use_rms_norm True"),
    "bitnet: other layers": (changed(BITNET, linear_class="bit"), Unsupported, "linear_class 'bit'"),
    "bitnet: no scale": (changed(BITNET, {"q_proj.weight_scale": None}), FormatError, "weight_scale' is missing"),
    "bitnet: scales of rows": (changed(BITNET, {"q_proj.weight_scale": np.ones(8, _F32)}), FormatError, r"is \[8\]"),
    "bitnet: integer scale": (
        changed(BITNET, {"q_proj.weight_scale": np.ones(1, np.int8)}),
        Unsupported,
        "is I8, and only F32",
    ),
    "bitnet: stacked": (changed(BITNET, {"q_proj.weight": np.ones((1, 2, 16), np.uint8)}), FormatError, r"is \[1, 2, 16\]"),
    "torchao: no scale": (changed(TORCHAO, {f"{_TORCHAO}scale": None}), FormatError, "_weight_scale' is missing"),
    "torchao: exponents": (
        changed(TORCHAO, {f"{_TORCHAO}scale": np.ones((8, 1), np.uint8)}),
        Unsupported,
        "is U8, and only F32",
    ),
    "torchao: other blocks": (changed(TORCHAO, {f"{_TORCHAO}scale": np.ones((3, 1), _F32)}), FormatError, "do not divide"),
    "torchao: bands of integers": (changed(TORCHAO, {f"{_TORCHAO}scale": np.ones((4, 2), _F32)}), FormatError, "do not divide"),
    "torchao: column": (changed(TORCHAO, {f"{_TORCHAO}scale": np.ones(8, _F32)}), FormatError, "do not divide the matrix"),
    "torchao: bands of floats": (
        changed(torchao((8, 16), "Float8Tensor"), {f"{_TORCHAO}scale": np.ones((3, 1), _F32)}),
        FormatError,
        r"is \[3, 1\]: its blocks do not divide the matrix",
    ),
    "torchao: groups": (changed(TORCHAO, {f"{_TORCHAO}scale": np.ones((8, 3), _F32)}), FormatError, "do not divide the matrix"),
    "torchao: no groups": (changed(TORCHAO, {f"{_TORCHAO}scale": np.ones((8, 0), _F32)}), FormatError, "do not divide the"),
    "torchao: nothing": (changed(TORCHAO, {f"{_TORCHAO}qdata": np.ones((8, 0), np.int8)}), Unsupported, r"is \[8, 0\] I8; of"),
    "torchao: other zeros": (
        changed(TORCHAO, {f"{_TORCHAO}zero_point": np.ones((4, 1), np.int8)}),
        FormatError,
        r"is \[4, 1\]",
    ),
    "torchao: zeros of floats": (changed(TORCHAO, {f"{_TORCHAO}zero_point": np.ones((8, 1), _F32)}), Unsupported, "is F32"),
    "torchao: 4 bits in a byte": (
        changed(TORCHAO, {f"{_TORCHAO}qdata": np.ones((8, 8), np.uint8)}),
        Unsupported,
        "U8; of",
    ),
    "torchao: scaled inputs": (changed(TORCHAO, {f"{_TORCHAO}act_pre_scale": np.ones(16, _F32)}), Unsupported, "is part of a"),
    "torchao: no codes": (changed(TORCHAO, {f"{_TORCHAO}qdata": None}), FormatError, "_weight_scale' is part of"),
    "gptq: other bits": (changed(GPTQ, bits=5), Unsupported, "bits 5 are not read, only 2, 3, 4 and 8"),
    "gptq: boolean bits": (changed(GPTQ, bits=True), Unsupported, "bits True are not read"),
    "gptq: no bits": (changed(GPTQ, bits=None), Unsupported, "bits None are not read"),
    "gptq: Marlin": (changed(GPTQ, checkpoint_format="marlin"), Unsupported, "checkpoint_format 'marlin' are not read"),
    "gptq: old Marlin": (changed(GPTQ, is_marlin_format=True), Unsupported, "Marlin's layout"),
    "gptq: 16-bit words": (changed(GPTQ, pack_dtype="int16"), Unsupported, "pack_dtype 'int16' are not read"),
    "gptq: no group": (changed(GPTQ, group_size=0), FormatError, "group_size in config.json is 0, not -1 or"),
    "gptq: group of text": (changed(GPTQ, group_size="32"), FormatError, "group_size in config.json is '32'"),
    "gptq: huge group": (changed(GPTQ, group_size=10**99), FormatError, "group_size in config.json is 1000"),
    "gptq: other group": (changed(GPTQ, group_size=64), FormatError, r"scales' is \[3, 64\], .* require \[2, 64\]"),
    "gptq: bits of others": (changed(GPTQ, bits=8), FormatError, r"qweight' is \[12, 64\], .* require \[24, 64\]"),
    "gptq: no zeros": (changed(GPTQ, {"q_proj.qzeros": None}), FormatError, "'q_proj.qzeros' is missing"),
    "gptq: no scales": (changed(GPTQ, {"q_proj.scales": None}), FormatError, "'q_proj.scales' is missing"),
    "gptq: scales": (changed(GPTQ, {"q_proj.scales": np.ones((3, 64), np.int16)}), Unsupported, "is I16, and only F16, BF16"),
    "gptq: a vector": (changed(GPTQ, {"q_proj.qweight": np.ones(64, np.int32)}), FormatError, r"require \[any, any\]"),
    "gptq: short g_idx": (changed(GPTQ, {"q_proj.g_idx": np.zeros(8, np.int32)}), FormatError, r"require \[1, 64\]"),
    "gptq: twice": (changed(GPTQ, {"q_proj.weight": np.ones((64, 96), _F32)}), FormatError, "stored twice"),
    "awq: gemv": (changed(AWQ, version="gemv"), Unsupported, "version 'gemv' are not read, only 'gemm'"),
    "awq: gemv_fast": (changed(AWQ, version="gemv_fast"), Unsupported, "version 'gemv_fast' are not read"),
    "awq: Marlin": (changed(AWQ, version="marlin"), Unsupported, "version 'marlin' are not read"),
    "awq: other bits": (changed(AWQ, bits=8), Unsupported, "bits 8 are not read, only 4"),
    "awq: no group": (changed(AWQ, group_size=None), FormatError, "group_size in config.json is None"),
    "awq: few zeros": (changed(AWQ, {"q_proj.qzeros": np.ones((2, 8), np.int32)}), FormatError, r"require \[3, 8\]"),
    "awq: few scales": (changed(AWQ, {"q_proj.scales": np.ones((3, 60), np.float16)}), FormatError, r"require \[3, 64\]"),
    "exl3: nine bits": (changed(EXL3, {"q_proj.trellis": np.zeros((16, 8, 144), np.int16)}), FormatError, "a K of 1 to 8"),
    "exl3: no bits": (changed(EXL3, {"q_proj.trellis": np.zeros((16, 8, 0), np.int16)}), FormatError, "a K of 1 to 8"),
    "exl3: odd width": (changed(EXL3, {"q_proj.trellis": np.zeros((16, 8, 65), np.int16)}), FormatError, "a K of 1 to 8"),
    "exl3: no padding": (changed(EXL3, {"q_proj.trellis": np.zeros((15, 8, 64), np.int16)}), FormatError, r"not \[8 · n"),
    "exl3: a matrix": (changed(EXL3, {"q_proj.trellis": np.zeros((16, 8), np.int16)}), FormatError, "require"),
    "exl3: words": (changed(EXL3, {"q_proj.trellis": np.zeros((16, 8, 64), np.int32)}), Unsupported, "is I32, and only I16"),
    "exl3: no scales": (changed(EXL3, {"q_proj.suh": None}), FormatError, "'q_proj.suh' is missing"),
    "exl3: few scales": (changed(EXL3, {"q_proj.svh": np.ones(256, np.float16)}), FormatError, r"require \[128\]"),
    "exl3: wide scales": (changed(EXL3, {"q_proj.svh": np.ones(128, _F32)}), Unsupported, "is F32, and only F16"),
    "exl3: two codebooks": (changed(EXL3, {"q_proj.mcg": np.ones((), np.int32)}), FormatError, "name two codebooks"),
    "exl3: padded bias": (
        changed(exl3((96, 256), hidden_size=96), {"q_proj.bias": np.ones(128, np.float16)}),
        Unsupported,
        "'q_proj.bias' is .128., and its layer has 96 outputs",
    ),
    "exl3: padded from what": (
        exl3((96, 256), hidden_size=96, vocab_size=100),
        Unsupported,
        r"leave open from what: \[96, 100\]",
    ),
    "mlx: other mode": (changed(MLX, mode="nf4"), Unsupported, "mode 'nf4' are not read, only 'affine', 'mxfp4'"),
    "mlx: other bits": (changed(MLX, bits=7), Unsupported, "bits 7 are not read, only 2, 3, 4, 5, 6 and 8"),
    "mlx: bits of others": (changed(MLX, bits=8), FormatError, r"scales' is \[48, 2\], .* require \[48, 1\]"),
    **{
        f"{kind}: rotated": (changed(case, rotation="hadamard"), Unsupported, "rotation 'hadamard' are not read: inputs")
        for kind, case in (("gptq", GPTQ), ("awq", AWQ))
    },
    "gptq: two formats": (
        changed(GPTQ, format="gptq_v2"),
        Unsupported,
        "checkpoint_format 'gptq' and format 'gptq_v2' in config.json contradict each other",
    ),
    "mlx: no group": (changed(MLX, group_size=0), FormatError, "group_size in config.json is 0"),
    "mlx: one group": (changed(MLX, group_size=-1), FormatError, "which 4 bits in groups of -1 do not fill"),
    "mlx: odd group": (changed(MLX, group_size=48), FormatError, "which 4 bits in groups of 48 do not fill"),
    "mlx: odd words": (
        changed(MLX, {"q_proj.weight": np.ones((48, 17), np.uint32)}, bits=3),
        FormatError,
        "which 3 bits in groups of 64 do not fill",
    ),
    "mlx: no biases": (changed(MLX, {"q_proj.biases": None}), FormatError, "'q_proj.biases' is missing"),
    "mlx: few biases": (changed(MLX, {"q_proj.biases": np.ones((48, 1), np.float16)}), Unsupported, "is F16, and only BF16"),
    "mlx: integers": (changed(MLX, {"q_proj.scales": np.ones((48, 2), np.uint8)}), Unsupported, "is U8, and only F32"),
    "mlx: mxfp4 scales": (changed(MXFP4, {"q_proj.scales": np.ones((48, 4), _F32)}), Unsupported, "is F32, and only U8"),
    "mlx: stacked": (changed(MLX, {"q_proj.weight": np.ones((2, 24, 16), np.uint32)}), Unsupported, "switch_mlp"),
    "modelopt: other": (modelopt((8, 32), algorithm="W4A16_AWQ"), Unsupported, "quant_algo 'W4A16_AWQ' are not read"),
    "modelopt: transposed model": (
        replace(NVFP4, config={**NVFP4.config, "model_type": "gpt2"}),
        Unsupported,
        r"ModelOpt weights of model_type 'gpt2' are not read: its layers store \[inputs, outputs\]",
    ),
    "modelopt: smoothed": (
        changed(NVFP4, {"q_proj.pre_quant_scale": np.ones(32, _F32)}),
        Unsupported,
        "scales activations before its layer",
    ),
    "modelopt: few scales": (
        changed(NVFP4, {"q_proj.weight_scale": np.ones((8, 3), E4M3)}),
        FormatError,
        r"is \[8, 3\], .* need \[8, 2\]",
    ),
    "modelopt: no factor": (changed(NVFP4, {"q_proj.weight_scale_2": None}), FormatError, "weight_scale_2' is missing"),
    "int8: few scales": (changed(INT8, {"q.SCB": np.ones(7, _F32)}), FormatError, r"is \[7\], .* require \[8\]"),
    "int8: no codes": (changed(INT8, {"q.weight": None}), FormatError, "'q.weight' is missing"),
    "int8: plain codes": (changed(INT8, {"q.weight": np.ones((8, 16), _F32)}), Unsupported, "is F32, and only I8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_and_damaged_checkpoints_are_refused_when_opened(name: str, tmp_path: Path) -> None:
    case, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        opened(tmp_path, case).close()
    assert type(caught.value) is kind
    assert caught.value.finding.fix


TWO: dict[str, Case] = {
    "gptq": joined(gptq((64, 96)), gptq((64, 96), name="k_proj")),
    "desc_act": joined(ORDERED, gptq((64, 96), desc_act=True, name="k_proj")),
    "awq": joined(AWQ, awq((64, 96), name="k_proj")),
    "exl3": joined(EXL3, exl3((128, 256), name="k_proj")),
    "mlx": joined(MLX, mlx((48, 128), name="k_proj")),
    "mxfp4": joined(MXFP4, mlx((48, 128), mode="mxfp4", group_size=32, name="k_proj")),
    "nvfp4": joined(NVFP4, modelopt((8, 32), name="k_proj")),
    "fp8": joined(modelopt((8, 32), algorithm="FP8"), modelopt((8, 32), algorithm="FP8", name="k_proj")),
    "nf4": joined(NF4, bnb4((8, 64), name="k_proj")),
    "nested": joined(NESTED, bnb4((8, 64), nested=True, name="k_proj")),
    "int8": joined(INT8, bnb8((8, 16), name="k_proj")),
}
_OPTIONAL = (".bias", "input_scale", "weight_format")


def parts(case: Case) -> list[str]:
    """The tensors of k_proj without which its weight cannot be decoded."""
    names = [name for name in case.tensors if name.startswith("k_proj.") and not name.endswith(_OPTIONAL)]
    return [name for name in names if not name.endswith("g_idx") or case.config["quantization_config"]["desc_act"]]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, case in TWO.items() for name in parts(case)])
def test_a_quantised_weight_without_one_of_its_tensors_is_refused_when_opened(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"missing|has no") as caught:
        opened(tmp_path, changed(TWO[kind], {name: None})).close()
    assert "k_proj" in str(caught.value)
    assert "download it again" in caught.value.finding.fix


@pytest.mark.parametrize("kind", TWO)
def test_tensors_that_merely_have_the_names_of_parts_are_plain(kind: str, tmp_path: Path) -> None:
    unrelated = (
        "router.scales",
        "router.bias",
        "altup.biases",
        "norm.scale",
        "norm.bias",
        "embed_tokens.weight",
        "gate.weight",
    )
    plain = {name: np.ones((8, 4), _F32) for name in (*unrelated, "gate.scales", "gate.biases", "gate.weight_scale")}
    with opened(tmp_path, changed(TWO[kind], plain)) as checkpoint:
        assert {*checkpoint.specs} == {*plain, *TWO[kind].plain}


READ: dict[str, tuple[Case, type[WeightsmithError], str]] = {
    "gptq: high group": (
        changed(GPTQ, {"q_proj.g_idx": np.full(96, 3, np.int32)}),
        FormatError,
        "holds groups 3 to 3, and the weight has 3",
    ),
    "gptq: negative group": (
        changed(GPTQ, {"q_proj.g_idx": np.arange(-1, 95, dtype=np.int32) // 32}),
        FormatError,
        "holds groups -1 to 2, and the weight has 3",
    ),
    "bitnet: fourth code": (changed(BITNET, {"q_proj.weight": np.full((2, 16), 255, np.uint8)}), FormatError, "the code 3"),
    "int8: for one GPU": (changed(INT8, {"q.weight_format": np.ones((), np.uint8)}), Unsupported, "only rows"),
}


@pytest.mark.parametrize("name", READ)
def test_values_that_no_weight_can_have_are_refused_when_they_are_read(name: str, tmp_path: Path) -> None:
    case, kind, message = READ[name]
    with opened(tmp_path, case) as checkpoint, pytest.raises(kind, match=message) as caught:
        checkpoint.read(next(iter(case.plain)))
    assert str(tmp_path) in caught.value.finding.where


# ---- the interface


class Quantised(SourceTests):
    """Every test of a source. A subclass defines `cases`, of which the first two are joined."""

    cases: tuple[Case, Case]

    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        one = joined(*self.cases)
        norm = np.arange(5, dtype=np.float16)
        write_checkpoint(tmp_path / "a", {**one.tensors, "z.norm": norm}, one.config, max_shard_bytes=20_000)
        write_checkpoint(tmp_path / "b", self.cases[0].tensors, one.config)
        return SourceCase(
            lambda: open_checkpoint(tmp_path / "a").source,
            {**dict(sorted(one.plain.items())), "z.norm": norm},
            lambda: open_checkpoint(tmp_path / "b").source,
        )


class TestExl3(Quantised):
    cases = exl3((200, 300), bits=3, hidden_size=200, intermediate_size=300, name="a"), exl3((128, 512), bits=5, name="b")


class TestMlx(Quantised):
    cases = mlx((37, 192), bits=3, group_size=32, name="a"), mlx((300, 128), bits=3, group_size=32, name="b", seed=1)


class TestTorchao(Quantised):
    cases = torchao((37, 192), grid=(37, 3), name="a"), torchao((300, 128), "Float8Tensor", grid=(3, 1), name="b", seed=1)


class TestBitNet(Quantised):
    cases = bitnet((36, 192), name="a"), bitnet((300, 128), name="b", seed=1)


class TestModelOpt(Quantised):
    cases = modelopt((37, 192), name="a"), modelopt((300, 128), algorithm="FP8", name="b", seed=1)


class QuantisedWithShapes(Quantised):
    """The shapes of weights are stored with their codes."""

    def test_a_file_that_was_replaced_before_the_first_read_is_not_read(self, case: SourceCase) -> None:
        """Shapes are read when it is opened, so the files are open: the old ones are read, and the change is noticed."""
        with closing(case.open()) as source:
            for path in source.paths:
                path.with_name("aside").write_bytes(path.read_bytes())
                path.with_name("aside").replace(path)
            with pytest.raises(CheckpointError, match="changed after it was opened"):
                source.check_unchanged()
            for name in source.specs:
                with contextlib.suppress(CheckpointError):  # of a file that was not opened yet
                    assert read(source, name).tobytes() == case.expected[name].tobytes()


class TestBitsandbytes4(QuantisedWithShapes):
    cases = bnb4((37, 65), block=64, nested=True, name="a.weight"), bnb4((300, 128), name="b.weight", seed=1)


class TestBitsandbytes8(Quantised):
    cases = bnb8((37, 65), name="a"), bnb8((300, 128), name="b", seed=1)


class TestGptq(Quantised):
    cases = gptq((64, 224), bits=3, desc_act=True, bias=False, name="a"), gptq((320, 96), symmetric=False, bits=3, name="b")


class TestAwq(Quantised):
    cases = awq((64, 224), name="a"), awq((320, 96), name="b", seed=1)


def test_gptq_modules_may_have_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    case = joined(gptq((64, 96), dynamic={"+:b": {"bits": 8}}), gptq((32, 64), bits=8, group_size=16, name="b"))
    with opened(tmp_path, case) as checkpoint:
        for name, plain in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), plain)


def mixed(*cases: Case) -> Case:
    """AutoRound's weights with bits and groups of their own."""
    return joined(replace(cases[0], config=changed(cases[0], extra_config={"b": {"bits": 2}}).config), *cases[1:])


def test_autoround_modules_may_have_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    first = autoround(gptq, "auto_round:auto_gptq", indexed=False)
    case = mixed(first, *(gptq((32, 64), bits=b, group_size=16, name=f"m{b}", indexed=False) for b in (2, 3, 5, 8)))
    with opened(tmp_path, case) as checkpoint:
        for name, plain in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), plain)


@pytest.mark.parametrize(
    ("other", "kind", "message"),
    [
        (gptq((8, 64), bits=2, name="b", indexed=False), Unsupported, "the bits of 'b' cannot be told: with 8 outputs"),
        (
            changed(gptq((32, 64), name="b", indexed=False), {"b.scales": np.ones((3, 32), np.float16)}),
            FormatError,
            "'b.scales' has 3 groups, which do not divide 64 inputs",
        ),
    ],
)
def test_bits_and_groups_that_shapes_do_not_tell_are_refused(
    other: Case, kind: type[WeightsmithError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        opened(tmp_path, mixed(autoround(gptq, "auto_round:auto_gptq", indexed=False), other))


def test_mlx_modules_may_have_settings_of_their_own(tmp_path: Path) -> None:
    overrides = {"b": {"bits": 8, "group_size": 32}, "c": {"bits": 8}, "d": False}
    eight = mlx((8, 64), bits=8, group_size=32, name="b"), mlx((8, 64), bits=8, name="c")
    case = joined(mlx((8, 64), bits=2, group_size=32, name="a", **overrides), *eight)
    case = replace(case, tensors={**case.tensors, "d.bias": np.ones(8, np.float16)})
    with opened(tmp_path, case) as checkpoint:
        for name, plain in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), plain)


@pytest.mark.parametrize("kind", ["Float8Tensor", "Int8Tensor"])
def test_one_scale_of_torchao_may_be_a_number(kind: str, tmp_path: Path) -> None:
    case = torchao((8, 16), kind)
    numbers = {name: a[0, 0] for name, a in case.tensors.items() if not name.endswith("qdata")}
    with opened(tmp_path, changed(case, numbers)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


def test_names_like_those_of_torchao_are_not_enough(tmp_path: Path) -> None:
    with opened(tmp_path, replace(TORCHAO, config={"model_type": "llama"})) as checkpoint:
        assert checkpoint.quantised == "torchao (tensor 'q_proj._weight_qdata')"


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_the_scale_of_bitnet_may_be_a_number(kind: str, tmp_path: Path) -> None:
    case = bitnet((8, 16), kind)
    with opened(tmp_path, changed(case, {"q_proj.weight_scale": case.tensors["q_proj.weight_scale"][0]})) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


ALGORITHMS = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "fp8_pb_wo", "MXFP8", "NVFP4", "W4A16_NVFP4"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_modelopt_weights_are_codes_times_scales(algorithm: str, tmp_path: Path) -> None:
    case = modelopt((160, 288), algorithm=algorithm)
    with opened(tmp_path, case) as checkpoint:
        assert list(checkpoint.specs) == ["q_proj.weight"]
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])
        assert [note.what for note in checkpoint.notes] == [
            "1 scale(s) of activations or of the KV cache are dropped: plain weights have none"
        ]


def test_modelopt_may_store_each_weight_in_another_way(tmp_path: Path) -> None:
    """The layers are named in config.json, too, but the scales of a weight say what it is."""
    algorithms = sorted({algorithm.upper() for algorithm in ALGORITHMS})
    cases = [modelopt((160, 288), algorithm=algorithm, name=f"m{k}", seed=k) for k, algorithm in enumerate(algorithms)]
    case = changed(joined(*cases), quant_algo="MIXED_PRECISION", quantized_layers={"m0": {"quant_algo": algorithms[0]}})
    with opened(tmp_path, case) as checkpoint:
        assert sorted(checkpoint.specs) == [f"m{k}.weight" for k in range(len(algorithms))]
        for name, plain in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), plain)


def test_a_format_of_gptq_is_read_where_it_is_stated(tmp_path: Path) -> None:
    case = gptq((64, 96), version="gptq_v2")
    for name, entry in (("a", {"checkpoint_format": None, "format": "gptq_v2"}), ("b", {"format": "gptq_v2"})):
        with opened(tmp_path / name, changed(case, **entry)) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with other weights"])
@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_modelopt_experts_may_be_stacked(algorithm: str, factors: int, alone: bool, tmp_path: Path) -> None:
    rng, name = np.random.default_rng(factors), "mlp.experts.gate_up_proj"
    one = rng.uniform(0.01, 0.1, factors).astype(np.float32)
    if algorithm == "FP8":
        stored = rng.integers(0, 126, (2, 64, 48)).astype(np.uint8).view(E4M3)
        scales = {"weight_scale": one[:1]}
        plain = stored.astype(np.float32) * one[0]
    else:  # an expert's weights are quantised as [outputs, inputs], and transposed with their scales
        rows = [modelopt((48, 64), seed=seed) for seed in range(2)]
        parts = [np.stack([case.tensors[f"q_proj.{part}"].T for case in rows]) for part in ("weight", "weight_scale")]
        stored, scales = parts[0], {"weight_scale": parts[1], "weight_scale_2": one if factors > 1 else one[0]}
        float4 = np.array([*(0, 0.5, 1, 1.5, 2, 3, 4, 6), *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6)], np.float32)
        codes = np.stack([stored & 15, stored >> 4], 2).reshape(2, 64, 48)
        plain = float4[codes] * (parts[1].astype(np.float32) * one[:, None, None]).repeat(16, 1)
    other = modelopt((8, 32), algorithm=algorithm)
    tensors = {name: stored, **{f"{name}_{part}": a for part, a in scales.items()}, f"{name}_input_scale": one[:1]}
    tensors |= {f"{name}_bias": np.ones((2, 48), BF16)} | ({} if alone else other.tensors)
    with opened(tmp_path, replace(other, tensors=tensors)) as checkpoint:
        assert set(checkpoint.specs) == {name, f"{name}_bias"} | (set() if alone else set(other.plain))
        assert checkpoint.natural_dtype(name).name == "BF16"
        np.testing.assert_array_equal(checkpoint.read(name), plain)
        out = np.empty(5000, np.float32)
        checkpoint.read_into(name, 4 * 1007, out)
        np.testing.assert_array_equal(out, plain.reshape(-1)[1007:6007])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_weight_scale": None}, "_weight_scale' is missing"),
        ({"_weight_scale": np.ones((2, 2, 48), E4M3)}, r"require \[2, 4, 48\]"),
        ({"_weight_scale_2": None}, "_weight_scale_2' is missing"),
        ({"_weight_scale_2": np.ones(3, np.float32)}, r"is \[3\], .* require \[1\]"),
        ({"": np.ones((2, 20, 48), np.uint8), "_weight_scale": np.ones((2, 2, 48), E4M3)}, "40 inputs, not a multiple of 16"),
    ],
)
def test_stacked_experts_need_all_their_scales(changes: dict[str, np.ndarray | None], message: str, tmp_path: Path) -> None:
    name, factor = "mlp.experts.down_proj", np.ones(1, np.float32)
    parts = {"": np.ones((2, 32, 48), np.uint8), "_weight_scale": np.ones((2, 4, 48), E4M3), "_weight_scale_2": factor}
    tensors = {name + end: a for end, a in {**parts, **changes}.items() if a is not None}
    with pytest.raises(FormatError, match=message):
        opened(tmp_path, replace(modelopt((8, 32)), tensors=tensors))


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
def test_modelopt_has_two_names(method: str, tmp_path: Path) -> None:
    with opened(tmp_path, changed(NVFP4, quant_method=method)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), NVFP4.plain["q_proj.weight"])


SETTINGS = {
    "hf_quant_config.json": (
        modelopt((8, 32)),
        {
            "producer": {"name": "modelopt", "version": "0.23"},
            "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None},
        },
    ),
    "quantize_config.json": (
        gptq((64, 96)),
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01, "quant_method": None},
    ),
    "quant_config.json": (awq((64, 96)), {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_beside_config_json_may_describe_the_quantisation(name: str, tmp_path: Path) -> None:
    case, settings = SETTINGS[name]
    folder = write_checkpoint(tmp_path / "m", case.tensors, {"model_type": "llama"})
    (folder / name).write_text(json.dumps(settings))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.quantised is None
        assert checkpoint.left_out == ()
        for tensor, plain in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(tensor), plain)
    (folder / name).write_text("[]")
    with pytest.raises(FormatError, match=name):
        open_checkpoint(folder)
    plain_model = write_checkpoint(tmp_path / "plain", dict(case.plain), {"model_type": "llama"})
    for content in (json.dumps(settings).encode(), b"[]", b"\xff"):
        (plain_model / name).write_bytes(content)
        with open_checkpoint(plain_model) as checkpoint:
            assert checkpoint.quantised is None
            assert checkpoint.config == {"model_type": "llama"}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_may_lie_on_the_hub(name: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, settings = SETTINGS[name]
    folder = write_checkpoint(tmp_path / "m", case.tensors, {"model_type": "llama"})
    (folder / name).write_text(json.dumps(settings))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve({("org/m", COMMIT): files}) as hub:
        use(hub, monkeypatch)
        for _ in range(2):  # the second time from the cache
            with open_checkpoint("org/m", cache_dir=tmp_path / "cache", stream=stream) as checkpoint:
                for tensor, plain in case.plain.items():
                    np.testing.assert_array_equal(checkpoint.read(tensor), plain)


def test_a_file_that_names_its_method_is_believed(tmp_path: Path) -> None:
    case = awq((64, 96))
    folder = write_checkpoint(tmp_path, case.tensors, {"model_type": "llama"})
    (folder / "quantize_config.json").write_text(json.dumps(case.config["quantization_config"]))
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


@pytest.mark.parametrize("codebook", ["mul1", "3inst"])
def test_exl3_scales_may_be_signs(codebook: str, tmp_path: Path) -> None:
    case = exl3((128, 384), bits=6, codebook=codebook, signs=True)
    with opened(tmp_path, case) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


@pytest.mark.slow
def test_a_codebook_that_is_no_text_counts_as_none(tmp_path: Path) -> None:
    with opened(tmp_path, changed(EXL3, codebook=["mcg"])) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), EXL3.plain["q_proj.weight"])


@pytest.mark.long
def test_the_size_of_an_exl3_weight_is_that_in_config_json(tmp_path: Path) -> None:
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 384}
    shapes = {"q_proj": (576, 576), "k_proj": (192, 576), "down_proj": (576, 384), "lm_head": (128, 576)}
    case = joined(*(exl3(shape, bits=2, name=name, text_config=sizes) for name, shape in shapes.items()))
    with opened(tmp_path, case) as checkpoint:
        for name, shape in shapes.items():
            assert checkpoint.specs[f"{name}.weight"].shape == shape
            np.testing.assert_array_equal(checkpoint.read(f"{name}.weight"), case.plain[f"{name}.weight"])


def test_a_gptq_weight_of_one_group_needs_no_g_idx(tmp_path: Path) -> None:
    case = gptq((40, 64), group_size=-1, desc_act=True, indexed=False)
    with opened(tmp_path, case) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


@pytest.mark.parametrize("zeros", [False, True])
def test_a_gptq_weight_without_g_idx_has_its_groups_in_order(zeros: bool, tmp_path: Path) -> None:
    case = gptq((40, 104), group_size=16, indexed=False)
    if zeros:
        case = changed(case, {"q_proj.g_idx": np.zeros(104, np.int32)})
    with opened(tmp_path, case) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("q_proj.weight"), case.plain["q_proj.weight"])


LARGE: dict[str, Callable[[], Case]] = {
    "bnb4": lambda: bnb4((1024, 2048), nested=True),
    "bnb8": lambda: bnb8((1024, 2048)),
    "gptq": lambda: gptq((2048, 1024), symmetric=False),
    "awq": lambda: awq((2048, 1024)),
    "exl3": lambda: exl3((2048, 1024), bits=3),
    "mlx": lambda: mlx((2048, 1024)),
}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_memory_of_a_read_does_not_grow_with_the_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "BAND_CODES", 1 << 17)  # the tensor is 16 times as large
    case = LARGE[name]()
    ((tensor, plain),) = case.plain.items()
    out = np.empty(plain.nbytes, np.uint8)
    with closing(opened(tmp_path, case)) as checkpoint:
        checkpoint.read_into(tensor, 0, out[: plain.shape[1] * 4])  # compiles
        tracemalloc.start()
        try:
            checkpoint.read_into(tensor, 0, out)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    np.testing.assert_array_equal(out.view(np.float32).reshape(plain.shape), plain)
    assert peak < (5 << 19 if name in ("gptq", "awq") else 5 << 20)  # of 8 MiB


# ---- models of them

HIDDEN, WIDE, VOCAB = 128, 256, 384
_LINEAR = {
    **{f"self_attn.{m}_proj": (HIDDEN, HIDDEN) for m in "qkvo"},
    **{f"mlp.{m}_proj": (WIDE, HIDDEN) for m in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, WIDE),
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **{"hidden_size": HIDDEN, "intermediate_size": WIDE, "vocab_size": VOCAB, "num_hidden_layers": 1, "rms_norm_eps": 1e-6},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False, "dtype": "bfloat16"},
}
MODELS: dict[str, Callable[..., Case]] = {
    "gptq": partial(gptq, symmetric=False, desc_act=True, bias=True),
    "awq": partial(awq, bias=True),
    "nf4": lambda shape, name, seed: bnb4(shape, name=f"{name}.weight", nested=True, seed=seed),
    "int8": bnb8,
    "exl3": partial(exl3, bits=3),
    "mlx": partial(mlx, bits=6),
}


def llama(folder: Path, kind: str) -> tuple[Path, Path]:
    """A model of one layer with weights of this kind, and its twin with the same weights in float32."""
    linear = [MODELS[kind](shape, name=f"model.layers.0.{m}", seed=k) for k, (m, shape) in enumerate(_LINEAR.items())]
    rng = np.random.default_rng(5)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    shapes |= {f"model.layers.0.{norm}_layernorm": (HIDDEN,) for norm in ("input", "post_attention")}
    plain = {f"{name}.weight": rng.normal(size=shape).astype(BF16) for name, shape in shapes.items()}
    case = joined(*linear)
    biases = {name: a for name, a in case.tensors.items() if name.endswith(".bias")}
    entries = {key: value for key, value in case.config.items() if key.startswith("quantization")}
    quantised = write_checkpoint(folder / kind, {**case.tensors, **plain}, {**LLAMA, **entries})
    return quantised, write_checkpoint(folder / f"{kind}-twin", {**case.plain, **biases, **plain}, LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_merge_with_a_plain_model_has_the_bytes_of_that_of_the_dequantised_twin(kind: str, tmp_path: Path) -> None:
    quantised, twin = llama(tmp_path, kind)
    with open_checkpoint(twin) as checkpoint:
        rng = np.random.default_rng(6)
        other = {name: rng.normal(size=spec.shape).astype(BF16) for name, spec in checkpoint.specs.items()}
    write_checkpoint(tmp_path / "other", other, LLAMA)
    outputs = []
    for model in (quantised, twin):
        models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in (model, tmp_path / "other")]
        out = tmp_path / f"out-{model.name}"
        weightsmith.merge({"merge_method": "linear", "models": models, "dtype": "bfloat16"}, out, fsync=False)
        outputs.append([(out / name).read_bytes() for name in ("model.safetensors", "config.json")])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", MODELS)
def test_a_dequantised_model_is_the_plain_one_in_the_dtype_that_loaders_compute_in(kind: str, tmp_path: Path) -> None:
    quantised, twin = llama(tmp_path, kind)
    weightsmith.dequantize(quantised, tmp_path / "out", fsync=False)
    with open_checkpoint(tmp_path / "out") as checkpoint, open_checkpoint(twin) as plain:
        assert checkpoint.config == LLAMA
        assert list(checkpoint.specs) == list(plain.specs)
        for name in checkpoint.specs:
            expected = plain.read(name)
            expected = expected.astype(BF16) if name.endswith("proj.weight") else expected
            assert checkpoint.read(name).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    ("kind", "value", "dtype"), [*((kind, np.nan, None) for kind in MODELS), ("gptq", np.inf, None), ("mlx", np.inf, "float32")]
)
@pytest.mark.filterwarnings("error")
def test_damaged_scales_stop_a_copy(kind: str, value: float, dtype: str | None, tmp_path: Path) -> None:
    folder, _ = llama(tmp_path, kind)
    file = folder / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(file))
    damaged = next(n for n in tensors if n.endswith(("q_proj.scales", "q_proj.SCB", "q_proj.weight.absmax", "q_proj.svh")))
    if tensors[damaged].dtype == np.uint8:  # codes of scales
        damaged = f"{damaged.removesuffix('absmax')}nested_absmax"
    tensors[damaged].reshape(-1)[0] = value
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(NonFinite, match=r"q_proj\.weight: element \[\d+, \d+\] is (nan|-?inf)"):
        weightsmith.dequantize(folder, tmp_path / "out", out_dtype=dtype, fsync=False)
    weightsmith.dequantize(folder, tmp_path / "out", out_dtype=dtype, allow_nonfinite=True, fsync=False)
