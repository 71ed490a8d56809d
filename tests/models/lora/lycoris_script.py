"""Run by a Python that has lycoris-lora: adapters of LyCORIS's modules with random numbers, and what LyCORIS merges.

lycoris_script.py FOLDER writes base.safetensors, and for each case NAME.safetensors, the file of factors, and
NAME.merged.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("locon.LoConModule", {"alpha": 3}),
    "DoRA of rows": ("locon.LoConModule", {"alpha": 3, "weight_decompose": True}),
    "DoRA of columns": ("locon.LoConModule", {"alpha": 3, "weight_decompose": True, "wd_on_out": False}),
    "a core": ("locon.LoConModule", {"alpha": 3, "use_tucker": True}),
    "LoHa": ("loha.LohaModule", {"alpha": 3}),
    "LoHa with cores": ("loha.LohaModule", {"alpha": 3, "use_tucker": True}),
    "LoKr": ("lokr.LokrModule", {"alpha": 3, "factor": 2}),
    "whole differences": ("full.FullModule", {}),
}


def layers() -> dict[str, Any]:
    """Modules of the base, with random numbers."""
    import torch

    modules = {
        "down_blocks.0.conv": torch.nn.Conv2d(4, 6, 3),
        "mid_block.to_q": torch.nn.Linear(8, 6),
        "mid_block.square": torch.nn.Linear(8, 8),
        "mid_block.norm": torch.nn.LayerNorm(8),
    }
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data = torch.randn_like(parameter)
    return modules


def wrapped(case: str, flat: str, module: Any) -> Any:
    """LyCORIS's module around one of the base, with random numbers; None for a norm that its algorithm leaves alone."""
    from importlib import import_module

    import torch

    kind, settings = CASES[case]
    if isinstance(module, torch.nn.LayerNorm):
        if case != "whole differences":
            return None
        kind, settings = "norms.NormModule", {}
    file, _, name = kind.partition(".")
    wrapper = getattr(import_module(f"lycoris.modules.{file}"), name)(flat, module, lora_dim=2, **settings)
    wrapper.eval()
    for key, parameter in wrapper.named_parameters():
        if not key.startswith("org_"):
            parameter.data = parameter.data + 0.5 * torch.randn_like(parameter)
    return wrapper


def trained(wrapper: Any, module: Any) -> tuple[dict[str, Any], Any, Any]:
    """What LyCORIS stores of a module, and the weight and the bias that it computes with (None: the module's own)."""
    name = type(wrapper).__name__
    if name == "NormModule":
        return (
            {"w_norm": wrapper.w_norm, "b_norm": wrapper.b_norm},
            module.weight + wrapper.w_norm,
            module.bias + wrapper.b_norm,
        )
    if name == "FullModule":
        return {"diff": wrapper.weight, "diff_b": wrapper.bias}, *wrapper.get_merged_weight(shape=module.weight.shape)
    if name == "LohaModule":  # get_merged_weight of 4.1.3 multiplies with alpha / rank twice
        return wrapper.custom_state_dict(), module.weight + wrapper.get_weight(module.weight.shape), None
    return wrapper.custom_state_dict(), *wrapper.get_merged_weight(shape=module.weight.shape)


def main(folder: Path) -> None:
    """Write all files."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    modules = layers()
    base = {f"{name}.{key}": value.clone() for name, module in modules.items() for key, value in module.state_dict().items()}
    save_file(base, folder / "base.safetensors")
    for case in CASES:
        tensors, merged = {}, dict(base)
        for name, module in modules.items():
            flat = f"lora_unet_{name.replace('.', '_')}"
            if (wrapper := wrapped(case, flat, module)) is None:
                continue
            with torch.no_grad():
                stored, weight, bias = trained(wrapper, module)
            tensors |= {f"{flat}.{key}": value.detach().clone().contiguous() for key, value in stored.items()}
            merged[f"{name}.weight"] = weight.detach().clone().contiguous()
            merged[f"{name}.bias"] = (module.bias if bias is None else bias).detach().clone()
        save_file(tensors, folder / f"{case}.safetensors")
        save_file(merged, folder / f"{case}.merged.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
