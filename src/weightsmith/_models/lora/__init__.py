"""LoRA adapters: what PEFT's files say (`adapter`), and which tensors of a base model they belong to (`apply`)."""

from weightsmith._models.lora.adapter import Adapter, open_adapter
from weightsmith._models.lora.apply import apply_adapter, find_places

__all__ = ["Adapter", "apply_adapter", "find_places", "open_adapter"]
