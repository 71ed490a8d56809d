"""Make LLM checkpoints from checkpoints, at the speed of copying files.

    import weightsmith
    weightsmith.merge("recipe.yml", "./merged")

Names are imported when they are first used, so that `import weightsmith` takes milliseconds and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightsmith._version import __version__ as __version__

if TYPE_CHECKING:
    from weightsmith.api import dequantize as dequantize
    from weightsmith.api import extract_lora as extract_lora
    from weightsmith.api import merge as merge
    from weightsmith.api import moe as moe
    from weightsmith.api import plan as plan
    from weightsmith.api import quantize as quantize
    from weightsmith.api import run as run
    from weightsmith.api import transplant_tokenizer as transplant_tokenizer
    from weightsmith.checkpoint import Checkpoint as Checkpoint
    from weightsmith.checkpoint import open_checkpoint as open_checkpoint
    from weightsmith.engine.local import Progress as Progress
    from weightsmith.errors import Busy as Busy
    from weightsmith.errors import CannotResume as CannotResume
    from weightsmith.errors import CheckpointError as CheckpointError
    from weightsmith.errors import Corrupt as Corrupt
    from weightsmith.errors import FormatError as FormatError
    from weightsmith.errors import LayerError as LayerError
    from weightsmith.errors import MethodError as MethodError
    from weightsmith.errors import MismatchError as MismatchError
    from weightsmith.errors import NonFinite as NonFinite
    from weightsmith.errors import NoSpace as NoSpace
    from weightsmith.errors import NotFound as NotFound
    from weightsmith.errors import OutputExists as OutputExists
    from weightsmith.errors import ParameterError as ParameterError
    from weightsmith.errors import PlanError as PlanError
    from weightsmith.errors import PluginError as PluginError
    from weightsmith.errors import PushFailed as PushFailed
    from weightsmith.errors import RecipeError as RecipeError
    from weightsmith.errors import ShapeError as ShapeError
    from weightsmith.errors import StoreError as StoreError
    from weightsmith.errors import SyntaxProblem as SyntaxProblem
    from weightsmith.errors import TensorLost as TensorLost
    from weightsmith.errors import UnknownKey as UnknownKey
    from weightsmith.errors import UnknownMethod as UnknownMethod
    from weightsmith.errors import UnknownName as UnknownName
    from weightsmith.errors import UnknownParameter as UnknownParameter
    from weightsmith.errors import Unsupported as Unsupported
    from weightsmith.errors import WeightsmithError as WeightsmithError
    from weightsmith.errors import WorkerLost as WorkerLost
    from weightsmith.execution import Merged as Merged
    from weightsmith.look.comparison import Comparison as Comparison
    from weightsmith.look.diff import diff as diff
    from weightsmith.look.inspect import Inspection as Inspection
    from weightsmith.look.inspect import inspect as inspect
    from weightsmith.look.preview import Preview as Preview
    from weightsmith.look.preview import preview as preview
    from weightsmith.look.values import Difference as Difference
    from weightsmith.memory import merge_state_dicts as merge_state_dicts
    from weightsmith.methods.user import PerModel as PerModel
    from weightsmith.methods.user import block_method as block_method
    from weightsmith.methods.user import tensor_method as tensor_method
    from weightsmith.outputs.save import save_file as save_file
    from weightsmith.outputs.save import save_model as save_model
    from weightsmith.outputs.verify import verify as verify
    from weightsmith.plans import Plan as Plan

_HOMES = {
    "Busy": "errors",
    "CannotResume": "errors",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "Comparison": "look.comparison",
    "Corrupt": "errors",
    "Difference": "look.values",
    "FormatError": "errors",
    "Inspection": "look.inspect",
    "LayerError": "errors",
    "Merged": "execution",
    "MethodError": "errors",
    "MismatchError": "errors",
    "NoSpace": "errors",
    "NonFinite": "errors",
    "NotFound": "errors",
    "OutputExists": "errors",
    "ParameterError": "errors",
    "PerModel": "methods.user",
    "Plan": "plans",
    "PlanError": "errors",
    "PluginError": "errors",
    "Preview": "look.preview",
    "PushFailed": "errors",
    "Progress": "engine.local",
    "RecipeError": "errors",
    "ShapeError": "errors",
    "StoreError": "errors",
    "SyntaxProblem": "errors",
    "TensorLost": "errors",
    "UnknownKey": "errors",
    "UnknownMethod": "errors",
    "UnknownName": "errors",
    "UnknownParameter": "errors",
    "Unsupported": "errors",
    "WeightsmithError": "errors",
    "WorkerLost": "errors",
    "block_method": "methods.user",
    "dequantize": "api",
    "diff": "look.diff",
    "extract_lora": "api",
    "inspect": "look.inspect",
    "merge": "api",
    "merge_state_dicts": "memory",
    "moe": "api",
    "open_checkpoint": "checkpoint",
    "plan": "api",
    "preview": "look.preview",
    "quantize": "api",
    "run": "api",
    "save_file": "outputs.save",
    "save_model": "outputs.save",
    "tensor_method": "methods.user",
    "transplant_tokenizer": "api",
    "verify": "outputs.verify",
}

__all__ = [
    "Busy",
    "CannotResume",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "Corrupt",
    "Difference",
    "FormatError",
    "Inspection",
    "LayerError",
    "Merged",
    "MethodError",
    "MismatchError",
    "NoSpace",
    "NonFinite",
    "NotFound",
    "OutputExists",
    "ParameterError",
    "PerModel",
    "Plan",
    "PlanError",
    "PluginError",
    "Preview",
    "Progress",
    "PushFailed",
    "RecipeError",
    "ShapeError",
    "StoreError",
    "SyntaxProblem",
    "TensorLost",
    "UnknownKey",
    "UnknownMethod",
    "UnknownName",
    "UnknownParameter",
    "Unsupported",
    "WeightsmithError",
    "WorkerLost",
    "__version__",
    "block_method",
    "dequantize",
    "diff",
    "extract_lora",
    "inspect",
    "merge",
    "merge_state_dicts",
    "moe",
    "open_checkpoint",
    "plan",
    "preview",
    "quantize",
    "run",
    "save_file",
    "save_model",
    "tensor_method",
    "transplant_tokenizer",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightsmith' has no attribute '{name}'")
    value = getattr(import_module(f"weightsmith.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
