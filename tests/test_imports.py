"""`import weightsmith` is light, its names are pinned, and merging needs none of the optional packages."""

from __future__ import annotations

from pathlib import Path

import pytest

import weightsmith
from tests.cli_help import LINEAR, make_models, run_process

NAMES = [
    "Auto",
    "Bounds",
    "Busy",
    "CannotResume",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "Corrupt",
    "Difference",
    "Evaluation",
    "Finding",
    "FormatError",
    "Inspection",
    "Judge",
    "LayerError",
    "Merged",
    "MethodError",
    "MismatchError",
    "NoSpace",
    "NonFinite",
    "NotFound",
    "OutputExists",
    "OwnText",
    "ParameterError",
    "PerModel",
    "Plan",
    "PlanError",
    "PluginError",
    "Preview",
    "Progress",
    "PushFailed",
    "RecipeError",
    "Report",
    "SearchPlan",
    "ShapeError",
    "StoreError",
    "Sum",
    "Summary",
    "SyntaxProblem",
    "TensorLost",
    "Tuning",
    "UnknownKey",
    "UnknownMethod",
    "UnknownName",
    "UnknownParameter",
    "Unsupported",
    "WeightsmithError",
    "WorkerLost",
    "__version__",
    "auto",
    "block_method",
    "convert_lora",
    "demo_models",
    "dequantize",
    "diff",
    "evaluate",
    "extract_lora",
    "find_unfinished",
    "goals",
    "inspect",
    "merge",
    "merge_state_dicts",
    "methods",
    "model",
    "moe",
    "open_checkpoint",
    "plan",
    "plan_auto",
    "plan_convert_lora",
    "plan_dequantize",
    "plan_extract_lora",
    "plan_quantize",
    "plan_transplant_tokenizer",
    "preview",
    "quantize",
    "run",
    "save_file",
    "save_model",
    "statistics",
    "status",
    "tensor_method",
    "transplant_tokenizer",
    "tune",
    "verify",
    "write",
]


def test_import_weightsmith_loads_nothing_heavy() -> None:
    heavy = "torch transformers safetensors numpy numba pydantic yaml rich typer huggingface_hub ray"
    ran = run_process(code=f"import sys, weightsmith; print([m for m in '{heavy}'.split() if m in sys.modules])")
    assert (ran.out, ran.err) == ("[]\n", "")


def test_the_public_names_are_these_and_all_of_them_are_there() -> None:
    assert sorted(weightsmith.__all__) == NAMES
    for name in weightsmith.__all__:
        assert getattr(weightsmith, name) is not None
    assert set(dir(weightsmith)) >= set(NAMES)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'mrege'"):
        weightsmith.mrege  # noqa: B018


_COMMANDS = """
import sys
from weightsmith._app.cli import main

for command in (["plan", "linear.yml"], ["merge", "linear.yml", "out"], ["quantize", "a", "fp8", "--format", "fp8-dynamic"]):
    sys.argv = ["weightsmith", *command, "--quiet"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    print(*sorted(name for name in sys.modules if name in ("numba", "pydantic") or name.startswith("weightsmith.")))
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_merge_imports_the_rooms_that_it_needs_and_a_plan_no_compiler(tmp_path: Path) -> None:
    make_models(tmp_path)
    (tmp_path / "linear.yml").write_text(LINEAR)
    planned, merged, quantised = (line.split() for line in run_process(code=_COMMANDS, cwd=tmp_path).out.splitlines())
    assert "numba" not in planned
    assert "numba" in merged  # so the names are seen
    assert "pydantic" not in merged
    others = (
        *("_features.adapters.merge", "_features.mixture", "_features.quantisation.", "_features.transplant"),
        *("_activations", "_reports.look.", "_app.studio", "testing"),
        *("_methods.ties", "_models.formats.gguf", "_models.formats.gptq", "_models.lora.apply"),
    )
    imported = [name for name in merged if name.startswith(tuple(f"weightsmith.{other}" for other in others))]
    assert [name for name in imported if not name.endswith(".options")] == []
    assert "weightsmith._models.formats.compressed_tensors.writing" in quantised
    unused = *(f"_models.formats.{name}" for name in ("gguf", "gptq", "comfyui", "exl2", "exl3")), "_activations.work"
    assert [name for name in quantised if name.startswith(tuple(f"weightsmith.{room}" for room in unused))] == []


# Stands before all other finders, so that an installed package looks as if it were not there.
_BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "safetensors"):
            raise ModuleNotFoundError(f"blocked: {name}")
        return None

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.long
def test_merging_works_where_torch_transformers_and_safetensors_are_not_installed(tmp_path: Path) -> None:
    make_models(tmp_path)
    (tmp_path / "linear.yml").write_text(LINEAR)
    ran = run_process(
        "merge", "linear.yml", "out", code=_BLOCKED + "from weightsmith._app.cli import main; main()", cwd=tmp_path
    )
    assert ran.code == 0, ran.err
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize("package", ["torch", "transformers.models", "safetensors.numpy"])
def test_the_blocker_blocks(package: str) -> None:
    ran = run_process(code=_BLOCKED + f"import {package}")
    assert ran.code == 1
    assert "ModuleNotFoundError: blocked: " in ran.err
