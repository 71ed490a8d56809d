"""LoRA adapters: what PEFT's files say (`adapter`), and a model with one applied, computed as it is read (`applied`)."""

from weightsmith.lora.adapter import Adapter, open_adapter
from weightsmith.lora.applied import Applied

__all__ = ["Adapter", "Applied", "open_adapter"]
