"""The architectures of models that GGUF files are read and written for: a file for each, or for several that are relatives.

To add an architecture, add a file with a `FAMILY`, and its name to `NAMES`; or a package with an entry point of the group
`weightsmith.gguf_architectures`. `docs/adding-a-gguf-architecture.md` shows one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._base.plugins import Plugins
from weightsmith._models.formats import GGUF_ARCHITECTURES
from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.values import GgufValues
from weightsmith._models.structure.configs import with_defaults

if TYPE_CHECKING:
    from weightsmith._models.formats.gguf.base.vision import VisionHalf

NAMES = (
    "llama", "mistral", "qwen_vl", "qwen", "qwen_next", "gemma", "phi", "deepseek", "glm", "gpt_oss", "granite", "olmo",
    "cohere", "smollm", "internvl", "lfm2", "ernie", "exaone", "nemotron", "starcoder", "stablelm", "hunyuan", "seed_oss",
    "dots1", "afmoe", "mimo", "dbrx", "arcee", "minimax", "gpt_neox", "bert", "modernbert", "nomic", "jina", "eurobert",
    "apertus", "falcon", "jamba", "kimi", "mamba", "hy", "mellum", "laguna", "llama4", "gemma3n", "deepseek4", "bailing", "hy4",
    "minimax01",
)  # fmt: skip
"""weightsmith's files. Those whose `fits` tells them from others with the same `model_type` are before these."""

FAMILIES = Plugins(
    "GGUF architecture",
    GGUF_ARCHITECTURES,
    GgufFamily,
    {name: f"weightsmith._models.formats.gguf.architectures.{name}:FAMILY" for name in NAMES},
)

_SEVERAL_PARTS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vision_config")
"""What config.json of a model of several parts says beside its `text_config`, and its language model needs."""
_UNTIED = ("qwen3_vl_moe",)
"""Models of several parts that are untied by default, whatever their `text_config` says."""


def architectures() -> Iterator[GgufArchitecture]:
    """Every architecture: weightsmith's, then those of installed packages; each file is imported when it is reached.

    Raises PluginError for one that does not work.
    """
    return (architecture for family in FAMILIES for architecture in family.architectures)


def find_architecture(config: Mapping[str, Any]) -> GgufArchitecture | None:
    """The architecture of a model with this config.json; None if no GGUF file is written of it."""
    alike = (architecture for architecture in architectures() if config.get("model_type") in architecture.model_types)
    return next((architecture.of_config(config) for architecture in alike if architecture.fits(config)), None)


def architecture_of_config(config: Mapping[str, Any]) -> GgufArchitecture:
    """The architecture of a model. config: from `text_config`. Raises Unsupported for one that cannot be written."""
    if architecture := find_architecture(config):
        return architecture
    model_type = config.get("model_type")
    if model_type is None:
        what = "no GGUF file of a language model can be written without a model_type"
        fix = "repair config.json, or choose another format"
        raise Unsupported(what, where="config.json", fix=fix)
    known = ", ".join(dict.fromkeys(name for architecture in architectures() for name in architecture.model_types))
    fix = f"choose another format; GGUF files can be written for these: {known}"
    raise Unsupported(f"no GGUF file can be written of a model of the type {show(model_type)}", where="config.json", fix=fix)


def architecture_of_file(keys: Mapping[str, Any], tensors: Container[str], where: str) -> GgufArchitecture:
    """The architecture of a GGUF file. Raises Unsupported for one that is not read, FormatError if it is not stated.

    tensors  their names
    """
    name = keys.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError(f"general.architecture is {show(name)}, not a name", where=where, fix=DAMAGED)
    alike = (candidate for candidate in architectures() if candidate.readable and candidate.name == name)
    owners = (candidate for candidate in alike if candidate.owns(candidate.values(keys, where)) and candidate.holds(tensors))
    if architecture := next(owners, None):
        return architecture.of_keys(architecture.values(keys, where))
    with_experts = "expert_count" in GgufValues(keys, where, DAMAGED, f"{name}.")
    what = f"a GGUF file of the architecture {show(name)}{' with experts' if with_experts else ''}"
    known = ", ".join(dict.fromkeys(candidate.name for candidate in architectures() if candidate.readable))
    raise Unsupported(what, where=where, fix=f"Use the model's original checkpoint. GGUF files of these are read: {known}.")


def text_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The settings of the language model, with defaults: `text_config`, if config.json has one, else config.json itself."""
    whole = config or {}
    text = whole.get("text_config")
    if isinstance(text, dict):
        whole = {
            "model_type": whole.get("model_type"),
            **text,
            **({"tie_word_embeddings": False} if whole.get("model_type") in _UNTIED else {}),
            **{name: whole[name] for name in _SEVERAL_PARTS if whole.get(name) is not None},
        }
    architecture = find_architecture(whole)
    return whole if architecture is None else with_defaults(architecture.complete(whole))


def find_vision(config: Mapping[str, Any]) -> VisionHalf | None:
    """The vision half of a model; None if it has none, or one that is not written. config: all of config.json."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None
    halves = (half for family in FAMILIES for half in family.vision if half.model_type == config.get("model_type"))
    return next((half for half in halves if half.vision_type in ("", vision.get("model_type"))), None)
