"""What transformers would miss in a checkpoint. Run by `loading.py` in a process of its own: JSON in, JSON out.

No module of weightsmith is imported. The model is built on the meta device, where a tensor is a shape; nothing is downloaded,
and no code of a model is executed but transformers' own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_DATA_BYTES = 16 << 30
"""Of this process: a config.json may ask for a model of any size."""


def main() -> None:
    """Read `[config, tensors]`, write the answer of `compare`. Argument: seconds after which the process ends itself."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(int(sys.argv[1]))  # if the process that waits for the answer is killed
    gc.disable()  # of the seconds that imports take, a fifth; they leave nothing to collect
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    with os.fdopen(answer, "w") as out:
        json.dump(compare(*json.load(sys.stdin)), out)


def compare(config: Mapping[str, Any], tensors: Sequence[tuple[str, str, Sequence[int]]]) -> dict[str, Any]:
    """How a checkpoint differs from the model that transformers builds from its config.json.

    tensors  name, torch's name of the dtype, shape

    Returns {"unknown": why} where transformers has no such model, {"failed": message} where it cannot build or load one,
    {"differences": [[kind, name in transformers, details], ...]} otherwise; kind is missing, unexpected or shape. Where there
    are any, "loaded" has the patterns (`pattern_of`) of differing names of which others are loaded: a layer that is left out.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    model_type, names = config.get("model_type"), config.get("architectures")
    if model_type not in transformers.CONFIG_MAPPING:
        return {"unknown": f"model_type {model_type!r}"}
    name = names[0] if isinstance(names, list) and names else None
    model_class: Any = getattr(transformers, name, None) if isinstance(name, str) else transformers.AutoModel
    if not hasattr(model_class, "from_pretrained"):
        return {"unknown": f"the model class {name!r}"}
    try:
        import accelerate  # noqa: F401  from_pretrained needs it to place tensors on the meta device

        with tempfile.TemporaryDirectory() as folder:
            plain = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
            (Path(folder) / "config.json").write_text(json.dumps(plain))
            loaded = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if model_class is transformers.AutoModel:
            model_class = transformers.MODEL_MAPPING[type(loaded)]
        empty = {n: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for n, dtype, shape in tensors}
        model, info = model_class.from_pretrained(
            None,
            config=loaded,
            state_dict=empty,
            device_map={"": torch.device("meta")},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except ImportError as error:  # a package that this architecture needs
        return {"unknown": f"this model class without {error.name or str(error).splitlines()[0]}"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    differences = [["missing", key, ""] for key in sorted(info["missing_keys"])]
    differences += [["unexpected", key, ""] for key in sorted(info["unexpected_keys"])]
    for key, shape, expected in sorted(info["mismatched_keys"], key=str):
        differences.append(["shape", key, f"{list(shape)}, and the model class builds {list(expected)}"])
    if not differences:
        return {"differences": []}
    names = {key for _, key, _ in differences}
    loaded = {pattern_of(key) for key in model.state_dict() if key not in names}
    return {"differences": differences, "loaded": sorted(loaded & set(map(pattern_of, names)))}


def pattern_of(name: str) -> str:
    """A tensor's name, the same for all layers and experts."""
    return re.sub(r"\d+", "N", name)


if __name__ == "__main__":
    main()
