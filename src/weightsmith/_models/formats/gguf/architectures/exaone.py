"""EXAONE 4."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily, Windows
from weightsmith._models.formats.gguf.base.tensors import HEAD_NORMS, MLP, NORMS_AFTER, PROJECTIONS
from weightsmith._models.formats.gguf.base.values import GgufConfig


class Exaone4(GgufArchitecture):
    """EXAONE 4; only the larger of the two sizes, with 64 layers, has a window."""

    name = "exaone4"
    class_name = "Exaone4ForCausalLM"
    model_types = ("exaone4",)
    square = True
    layer = {**PROJECTIONS, **HEAD_NORMS, **MLP, **NORMS_AFTER}
    windows = Windows(4, stated=True)
    scaled = True

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        window, large = config.get("sliding_window"), config.count("num_hidden_layers") == 64
        config.need("sliding_window", window, (4096 if window is None else window) if large else None)


FAMILY = GgufFamily((Exaone4(),))
