"""EXL2, EXL3 and GPTQ: every weight that is written, as ExLlama's own kernels reconstruct it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import weightsmith
from tests.mini import write_checkpoint
from tests.models.formats.readers import exllama
from weightsmith._models.checkpoint import open_checkpoint

pytestmark = [pytest.mark.reader, pytest.mark.slow]

H, M, V = 256, 384, 64
SIZES = {
    **{f"self_attn.{part}_proj": (H, H) for part in ("q", "o")},
    **{f"self_attn.{part}_proj": (128, H) for part in ("k", "v")},
    **{f"mlp.{part}_proj": (M, H) for part in ("gate", "up")},
    "mlp.down_proj": (H, M),
}


def model(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {f"model.layers.{i}.{name}.weight": rng.normal(0, 0.02, size) for i in range(2) for name, size in SIZES.items()}
    norms = [f"model.layers.{i}.{name}_layernorm.weight" for i in range(2) for name in ("input", "post_attention")]
    tensors |= {name: np.ones(H) for name in (*norms, "model.norm.weight")}
    tensors |= {name: rng.normal(0, 0.02, (V, H)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        **{"model_type": "llama", "hidden_size": H, "intermediate_size": M, "vocab_size": V, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
        **{"max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "float16", "rope_theta": 10000.0},
    }
    return write_checkpoint(folder, {name: a.astype(np.float16) for name, a in tensors.items()}, config)


def stored(folder: Path) -> dict[str, np.ndarray]:
    return {name: a for file in folder.glob("*.safetensors") for name, a in safetensors.numpy.load_file(file).items()}


CASES: list[tuple[str, dict[str, Any]]] = [
    *[("exl2", {"bits": bits}) for bits in (2.6, 3, 3.5, 4.5, 5, 6, 7)],  # together, codes of 2, 3, 4, 5, 6 and 8 bits
    *[("exl3", {"bits": bits}) for bits in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)],
    ("gptq-4bit", {}),
]


@exllama.needs_exllama
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{options.get('bits', '')}" for name, options in CASES])
def test_exllama_reconstructs_the_weights_that_are_read(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {**options, "calibration": "none"} if options else {}
    weightsmith.quantize(model(tmp_path / "model"), tmp_path / "out", name, **settings)
    tensors, ending = stored(tmp_path / "out"), {"exl2": "q_weight", "exl3": "trellis"}.get(name, "qweight")
    modules = [key.removesuffix(f".{ending}") for key in tensors if key.endswith(f".{ending}")]
    assert len(modules) >= 14
    reconstruct = {"exl2": exllama.exl2, "exl3": exllama.exl3}.get(name, exllama.gptq)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        for module in modules:
            theirs, ours = reconstruct(tensors, module), np.asarray(checkpoint.read(f"{module}.weight")).T
            theirs = theirs[: ours.shape[0], : ours.shape[1]]
            if name == "exl3":  # the codes are theirs; the rotation is done here
                assert np.abs(theirs - ours).max() <= 1e-6 * np.abs(ours).max(), module
            else:
                np.testing.assert_array_equal(theirs, ours.astype(np.float16), err_msg=module)
