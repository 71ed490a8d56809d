"""What transformers would miss in a checkpoint, and the model that it builds, as PEFT sees it (`loading.py`).

Runs in a process of its own: JSON in, JSON out.

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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_DATA_BYTES = 16 << 30
"""Limit of this process: a config.json may ask for a model of any size."""

_MAPPINGS = tuple(f"MODEL_{kind}MAPPING" for kind in ("", "FOR_CAUSAL_LM_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_MASKED_LM_"))


def main() -> None:
    """Read `[question, arguments...]`, write the answer. Argument: seconds after which the process ends itself."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(int(sys.argv[1]))  # if the process that waits for the answer is killed
    gc.disable()  # a fifth of the seconds that imports take; they leave nothing to collect
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    warnings.simplefilter("ignore")
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    with os.fdopen(answer, "w") as out:
        question, *arguments = json.load(sys.stdin)
        json.dump(compare(*arguments) if question == "compare" else describe(*arguments), out)


def _open_config(config: Mapping[str, Any]) -> Any:
    """The config as transformers' object; code that it names is not executed."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        plain = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
        (Path(folder) / "config.json").write_text(json.dumps(plain))
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


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

        loaded = _open_config(config)
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


def describe(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The modules and tensors of the model, and which of them the tensors of a checkpoint become.

    names  of the checkpoint's tensors

    Returns {"unknown": why} where transformers has no such model or cannot build it, otherwise

    modules  name → linear, transposed (transformers' Conv1D), embedding, other
    tensors  name → shape, of all that is in the state: parameters and buffers
    names    tensor of the checkpoint → [tensor of the model, operations that make it of this and of others]
    tied     groups of tensors that are one
    redirected  last components of names of modules that PEFT takes for those of experts: they can only be `target_parameters`
    refused  last components of names of modules that PEFT gives no factors in this model
    experts  last components of names of single experts' matrices in the checkpoint that PEFT takes for those of parameters
    rows     modules of experts whose rows are inputs
    peft     whether PEFT is installed: `redirected`, `refused` and `experts` are not known without it

    Where config.json names no class, it is the one of `_MAPPINGS` that has most of the checkpoint's tensors, under their names.
    """
    import transformers

    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    model_type, listed = config.get("model_type"), config.get("architectures")
    if model_type not in transformers.CONFIG_MAPPING:
        return {"unknown": f"transformers has no model_type {model_type!r}"}
    name = listed[0] if isinstance(listed, list) and listed else None
    model_class: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(name, str) and not hasattr(model_class, "from_pretrained"):
        return {"unknown": f"transformers has no model class {name!r}"}
    try:
        return _description(_open_config(config), model_class, names)
    except ImportError as error:  # a package that this architecture needs
        return {"unknown": f"it cannot be asked without {error.name or str(error).splitlines()[0]}"}
    except Exception as error:
        return {"unknown": f"transformers cannot build it: {type(error).__name__}: {' '.join(str(error).split())}"[:500]}


def _description(loaded: Any, model_class: Any, names: Sequence[str]) -> dict[str, Any]:
    """The answer of `describe` for a config; model_class: None if it names none."""
    import torch
    import transformers

    mappings = [getattr(transformers, mapping_name, {}) for mapping_name in _MAPPINGS]
    classes = [mapping[type(loaded)] for mapping in mappings if type(loaded) in mapping]

    def build(model_class: Any) -> Any:
        with torch.device("meta"):
            model = model_class._from_config(loaded)
        model.tie_weights()
        return model

    if model_class is None:
        model_class = max(classes, key=lambda candidate: _fit(_names(build(candidate), names)))
    model = build(model_class)
    modules = dict(_modules(model))
    state = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    loaded_names = _names(model, names)
    return {
        "modules": modules,
        "tensors": state,
        "names": loaded_names,
        "tied": _tied(model),
        "redirected": (redirected := sorted(_redirected(model, lasts := _lasts(modules)))),
        "refused": sorted(
            _refused(partial(build, model_class), [name for last, name in lasts.items() if last not in redirected])
        ),
        "experts": sorted(_redirected(model, _lasts_of_experts(loaded_names))),
        "peft": find_spec("peft") is not None,
        "rows": [key for key, module in model.named_modules() if getattr(module, "is_transposed", False)],
    }


def _fit(renamed: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
    """How many tensors of a checkpoint a model has, and how many of them under their names."""
    return len(renamed), sum(name == key for name, (key, _) in renamed.items())


def _modules(model: Any) -> Iterator[tuple[str, str]]:
    """Each module, and as what PEFT takes it."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = {torch.nn.Linear: "linear", Conv1D: "transposed", torch.nn.Embedding: "embedding"}
    attention: list[str] = []  # torch's own reads the weights of the modules inside and does not call them
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.MultiheadAttention):
            attention.append(f"{name}.")
        kind = "linear" if _multiplies(module) else kinds.get(type(module), "other")
        yield name, "other" if name.startswith(tuple(attention)) else kind


def _multiplies(module: Any) -> bool:
    """Whether a module of a class derived from Linear does no more than that: a router returns more."""
    import torch

    if not isinstance(module, torch.nn.Linear) or type(module) is torch.nn.Linear:
        return False
    try:
        product = module(torch.empty(1, module.in_features, device="meta", dtype=module.weight.dtype))
    except Exception:
        return False
    return isinstance(product, torch.Tensor) and tuple(product.shape) == (1, module.out_features)


def _names(model: Any, names: Sequence[str]) -> dict[str, list[Any]]:
    """What each tensor of a checkpoint becomes: as transformers renames it while it loads."""
    state, prefix = model.state_dict(), model.base_model_prefix
    rename, renamings, converters = _renaming(model)
    renamed: dict[str, list[Any]] = {}
    for name in names:
        key, pattern = rename(name, renamings, converters, prefix, state)
        if pattern is None and key not in state and name in state:
            key = name
        if key in state:
            operations: list[Any] = next(
                (converter.operations for converter in converters if pattern in converter.source_patterns), []
            )
            renamed[name] = [key, [type(converter).__name__ for converter in operations]]
    return renamed


def _renaming(model: Any) -> tuple[Any, list[Any], list[Any]]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # transformers 4: names change by the prefix alone

        def rename(name: str, _renamings: Any, _converters: Any, prefix: str, state: Any) -> tuple[str, None]:
            ways = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
            return next((way for way in ways if way in state), name), None

        return rename, [], []
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    assert all(hasattr(entry, "rename_source_key") or isinstance(entry, WeightRenaming) for entry in renamings)
    return rename_source_key, renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def _tied(model: Any) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _lasts(modules: Mapping[str, str]) -> dict[str, str]:
    """Last component of a name → the first module that has it, for modules that may have factors."""
    lasts: dict[str, str] = {}
    for name, kind in modules.items():
        if kind in ("linear", "transposed") and name:
            lasts.setdefault(name.rpartition(".")[2], name)
    return lasts


def _lasts_of_experts(names: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """The same of the matrices of experts that the model has in parameters. names: as of `describe`."""
    stored = [name.removesuffix(".weight") for name, (_, operations) in names.items() if operations and ".experts." in name]
    return {name.rpartition(".")[2]: name for name in reversed(stored)}


def _redirected(model: Any, lasts: Mapping[str, str]) -> Iterator[str]:
    """Names that PEFT takes for those of experts' matrices, as transformers 4 had them."""
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # transformers 4, or PEFT before it
        return
    for last, name in lasts.items():
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, [])
        except ValueError:  # one of several that are fused now
            yield last
        else:
            if name not in config.target_modules:
                yield last


def _refused(build: Any, names: Sequence[str]) -> Iterator[str]:
    """Last components of the names of modules that PEFT does not wrap."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return

    def taken(some: Sequence[str]) -> bool:
        model = build()
        try:
            inject_adapter_in_model(LoraConfig(r=1, target_modules=list(some)), model)
            return all(isinstance(model.get_submodule(name), BaseTunerLayer) for name in some)
        except Exception:
            return False

    if names and not taken(names):
        yield from (name.rpartition(".")[2] for name in names if not taken([name]))


if __name__ == "__main__":
    main()
