"""Every architecture of transformers as a small checkpoint without data: right headers, and a hole for the numbers."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightsmith._models.structure.stacks import is_count_key

LAYERS = 4
Specs = dict[str, tuple[str, tuple[int, ...]]]
"""Name on disk → torch's name of the dtype, shape."""

_EXPERTS = re.compile(r"(^|_)experts?(_|$)")

_AUTO = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_BACKBONE_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_MAPPING",
)


def model_types() -> list[str]:
    """All model types that transformers knows."""
    import transformers

    return sorted(transformers.CONFIG_MAPPING.keys())


def classes_of(model_type: str) -> Iterator[type]:
    """The config's model classes: a language model, an encoder-decoder, a backbone, the bare one."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[model_type]
    seen: set[type] = set()
    for name in _AUTO:
        try:
            model_classes = getattr(transformers, name).get(config_class, None)
        except ValueError:  # the mapping names a class that does not exist
            continue
        for model_class in model_classes if isinstance(model_classes, tuple) else (model_classes,):
            if model_class is not None and model_class not in seen:
                if name != "MODEL_MAPPING" or not seen:
                    yield model_class
                seen.add(model_class)
                break


def small_configs(model_type: str) -> Iterator[Any]:
    """Configs with few layers, as far as the class lets itself be made so; at last the default one."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[model_type]
    try:
        default = config_class().to_dict()
    except Exception:
        return
    tries = [_small(default), {key: value for key, value in _small(default).items() if not isinstance(value, dict)}]
    for arguments in (*tries, {"num_hidden_layers": LAYERS}, {}):
        try:
            yield config_class(**arguments)
        except Exception:
            continue


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that make every stack of a config LAYERS deep."""
    small: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            inner = _small(value)
            if inner:
                small[key] = inner
                if "model_type" in value:
                    small[key] = {"model_type": value["model_type"], **inner}
        elif key == "global_attn_indexes" and value:
            small[key] = [LAYERS - 1]
        elif isinstance(key, str) and isinstance(value, int) and value > LAYERS:
            if is_count_key(key):
                small[key] = LAYERS - ("encoder" in key)
            elif _EXPERTS.search(key):
                small[key] = 2 if "per_tok" in key or "top" in key else 4
            elif key in ("n_group", "num_expert_group", "topk_group"):
                small[key] = 1
    return small


def with_derived_counts(config: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the number of layers that the class derives from others: older versions of transformers wrote it."""
    nested = {name: with_derived_counts(getattr(config, name), said[name]) for name in config.sub_configs if said.get(name)}
    try:
        count = config.num_hidden_layers
    except Exception:
        count = None
    return {**said, **nested, **({"num_hidden_layers": count} if isinstance(count, int) else {})}


def with_more_positions(config: Any) -> Any:
    """The same config with twice as many positions; None when the class does not take it."""

    def doubled(part: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {k: 2 * v for k, v in part.items() if "position" in str(k) and type(v) is int and v > LAYERS}
        return {**part, **numbers, **{key: doubled(value) for key, value in part.items() if isinstance(value, dict)}}

    try:
        return type(config).from_dict(doubled(config.to_dict()))
    except Exception:
        return None


def build(config: Any, model_class: Any) -> tuple[dict[str, Any], Specs] | None:
    """config.json and the tensors that `save_pretrained` would write; None when the class does not build from this config."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = model_class(config) if not hasattr(model_class, "_from_config") else model_class._from_config(config)
        state = {name: t for name, t in model.state_dict().items() if name not in model.all_tied_weights_keys}
        state = revert_weight_conversion(model, state)
    except Exception:
        return None
    said = json.loads(model.config.to_json_string(use_diff=True))
    said["architectures"] = [model_class.__name__]
    specs = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items()}
    return said, specs


def layers_of(model_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of layers of the model that transformers builds from a config.json, by name."""
    import torch

    from weightsmith._planning.planner.transformers_script import _open_config

    loaded = _open_config(config)
    with torch.device("meta"):
        model = model_class(loaded) if not hasattr(model_class, "_from_config") else model_class._from_config(loaded)
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}


def write(folder: Path, config: Mapping[str, Any], specs: Specs) -> str:
    """Write config.json, and a sparse model.safetensors without data; the folder."""
    from weightsmith._base.tensors import BY_TORCH_NAME

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in specs.items():
        size = BY_TORCH_NAME[dtype].itemsize
        for n in shape:
            size *= n
        header[name] = {"dtype": BY_TORCH_NAME[dtype].name, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)
    return str(folder)
