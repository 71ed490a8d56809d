"""Nemotron 3 and 4, whose MLPs have no gate."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import UNTIED, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, MLP_NORM, UNGATED_MLP


class Nemotron(GgufArchitecture):
    """Nemotron, and Minitron."""

    name = "nemotron"
    class_name = "NemotronForCausalLM"
    model_types = ("nemotron",)
    square = True
    layer = {**ATTENTION, **MLP_NORM, **UNGATED_MLP}
    shift = 1.0
    fixed = UNTIED
    eps = ("attention.layer_norm_epsilon", "norm_eps")
    partial = 0.5
    activation = "relu2"


FAMILY = GgufFamily((Nemotron(),))
