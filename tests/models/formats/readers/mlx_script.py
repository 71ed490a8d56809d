"""What mlx-lm computes. Run by the Python that has it, with requests of `test_mlx` on standard input."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import numpy as np


def main() -> None:
    """Answer each request with a file: logits [tokens, vocabulary], or what went wrong."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    halves = (mx.float16, mx.bfloat16)
    tokens, *folders = json.load(sys.stdin)
    for folder in map(Path, folders):
        try:
            model, _ = load_model(folder)
            model.update(tree_map(lambda x: x.astype(mx.float32) if x.dtype in halves else x, model.parameters()))
            np.save(folder / "mlx.npy", np.array(model(mx.array(tokens)[None])[0]))
        except Exception:
            (folder / "mlx.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
