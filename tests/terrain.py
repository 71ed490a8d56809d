"""Two diffusion models that make images on a CPU: UNets of 10 million parameters with the names of Stable Diffusion.

The package adaptive-terrain-diffusion (MIT) has one in ONNX: 0.4.1 the model that 0.4.2 was tuned from. They paint heights of
terrain in one step. WEIGHTSMITH_TERRAIN names an environment with onnxruntime, and the two wheels in it:

    python -m venv ENV && ENV/bin/pip install onnxruntime && cd ENV
    for version in 0.4.1 0.4.2; do bin/pip download --no-deps adaptive-terrain-diffusion==$version; done
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from weightsmith._models.tokenizers.vocabulary import fields

ENV = os.environ.get("WEIGHTSMITH_TERRAIN", "")
needs_terrain = pytest.mark.skipif(not ENV, reason="needs a diffusion model: WEIGHTSMITH_TERRAIN")

Weights = dict[str, npt.NDArray[np.float32]]
_FILE = "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx"
_PREFIXES = ("model.", "network.")
_SCRIPT = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
noise = (80 * np.random.default_rng(7).standard_normal((4, 1, 128, 128))).astype(np.float32)
inputs = {"noisy": noise, "sigma": np.full(4, 80, np.float32), "difficulty": np.linspace(0.1, 0.9, 4, dtype=np.float32)}
np.save(sys.argv[2], session.run(["denoised"], inputs)[0])
"""


def onnx_of(version: str) -> bytearray:
    """The file in a wheel."""
    (wheel,) = Path(ENV).glob(f"adaptive_terrain_diffusion-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return bytearray(archive.read(_FILE))


def _stored(data: bytearray) -> Iterator[tuple[str, list[int], memoryview]]:
    """Name, shape and bytes of each weight of an ONNX file: fields of ModelProto, GraphProto and TensorProto."""
    graphs = (graph for number, graph in fields(memoryview(data)) if number == 7 and isinstance(graph, memoryview))
    for tensor in (tensor for graph in graphs for number, tensor in fields(graph) if number == 5):
        assert isinstance(tensor, memoryview)
        parts = list(fields(tensor))
        shape = [value for number, value in parts if number == 1 and isinstance(value, int)]
        named = {number: value for number, value in parts if isinstance(value, memoryview)}
        name = bytes(named[8]).decode()
        if name.startswith(_PREFIXES) and 9 in named:
            yield name.partition(".")[2], shape, named[9]


def weights_of(data: bytearray) -> Weights:
    return {name: np.frombuffer(raw, "<f4").reshape(shape) for name, shape, raw in _stored(data)}


def images(data: bytearray, weights: Mapping[str, npt.NDArray[np.float32]], folder: Path) -> npt.NDArray[np.float64]:
    """Four images, [4, 128, 128], that the model of an ONNX file paints with other weights."""
    copied = bytearray(data)
    for name, shape, raw in _stored(copied):
        assert weights[name].shape == tuple(shape)
        raw[:] = weights[name].astype("<f4").tobytes()
    (folder / "model.onnx").write_bytes(copied)
    command = [Path(ENV) / "bin" / "python", "-c", _SCRIPT, folder / "model.onnx", folder / "images.npy"]
    subprocess.run(command, check=True)
    painted: npt.NDArray[np.float64] = np.load(folder / "images.npy")[:, 0].astype(np.float64)
    return painted
