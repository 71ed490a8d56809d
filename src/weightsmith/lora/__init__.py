"""LoRA adapters: what PEFT's files say (`adapter`), and which tensors of a base model they belong to (`apply`)."""

from weightsmith.lora.adapter import Adapter, open_adapter
from weightsmith.lora.apply import apply_adapter

__all__ = ["Adapter", "apply_adapter", "open_adapter"]
