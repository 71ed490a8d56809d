"""Seed-OSS."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, MLP, NORM_BETWEEN


class SeedOss(GgufArchitecture):
    """Seed-OSS."""

    name = "seed_oss"
    class_name = "SeedOssForCausalLM"
    model_types = ("seed_oss",)
    layer = {**ATTENTION, **MLP, **NORM_BETWEEN}
    fixed = {"attention_out_bias": False, "mlp_bias": False}


FAMILY = GgufFamily((SeedOss(),))
