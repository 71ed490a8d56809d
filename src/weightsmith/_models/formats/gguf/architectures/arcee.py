"""Arcee's AFM: Llama with MLPs that have no gate."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, MLP_NORM, UNGATED_MLP


class Arcee(GgufArchitecture):
    """AFM."""

    name = "arcee"
    class_name = "ArceeForCausalLM"
    model_types = ("arcee",)
    layer = {**ATTENTION, **MLP_NORM, **UNGATED_MLP}
    rotated = True
    activation = "relu2"


FAMILY = GgufFamily((Arcee(),))
