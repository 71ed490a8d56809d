"""The model card: README.md with the front matter that the Hub reads, and the papers of the method as BibTeX."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from weightsmith._base.errors import printable
from weightsmith._base.files import exists, expand_user
from weightsmith._base.redaction import redacted
from weightsmith._base.text import code, markdown
from weightsmith._execution.report import Moved, to_markdown
from weightsmith._files.containers import (
    ADAPTERS,
    DIFFUSERS_LORA,
    GGUF,
    GGUF_ADAPTER,
    MLX_ADAPTER,
    PEFT,
    SAFETENSORS,
    ShardLayout,
)
from weightsmith._files.hf_folder import hub_id_of, read_card
from weightsmith._files.subfolders import MODULES, PIPELINE
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._models.structure.configs import of_diffusers
from weightsmith._models.tokenizers.files import settings_in, settings_of
from weightsmith._planning.planner.steps import main_dtype
from weightsmith._plans import PLAIN, ModelInput, Plan

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_HUB_REF = re.compile(rf"{_HUB_ID.pattern}(@[\w./-]+)?", re.ASCII)
_VALUE = re.compile(r"[\w.:/+@ -]{1,200}", re.ASCII)
_LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True, slots=True)
class _CardPart:
    """A model, or the adapter applied to it.

    ref      as the recipe names it
    on_hub   it is a hub id
    card     front matter of its own card
    """

    ref: str
    on_hub: bool
    card: Mapping[str, Any]

    @property
    def licence(self) -> tuple[str, ...]:
        """`license`, `license_name` and `license_link`; () where the card names none."""
        values = [self.card.get(key, "") for key in _LICENCE_KEYS]
        return tuple(value if _is_plain(value) else "" for value in values) if _is_plain(values[0]) else ()

    @property
    def bases(self) -> list[str]:
        """The model on the Hub that it is, or else those that its card says it was made from."""
        if self.on_hub:
            return [self.ref.split("@")[0]]
        if hub_id := hub_id_of(self.ref):
            return [hub_id]
        named = self.card.get("base_model")
        return [n for n in (named if isinstance(named, list) else [named]) if isinstance(n, str) and _HUB_ID.fullmatch(n)]

    @property
    def linked(self) -> str:
        """Its name in Markdown."""
        return f"[{self.ref}](https://huggingface.co/{self.ref.split('@')[0]})" if self.on_hub else code(self.ref)


def model_card(
    plan: Plan,
    name: str,
    distance: tuple[Moved, ...] = (),
    section: str = "",
    *,
    inputs: Sequence[Checkpoint] = (),
    repo: str = "",
) -> str:
    """The card of a merged model: tags, how to load it, inputs, licences, method, the recipe word for word, and the citation.

    name      of the model, as its title
    distance  the whole first, then layer by layer; () when it has no base
    section   more, in Markdown; "" for nothing
    inputs    of the plan: licences and base models are taken from their own cards
    repo      on the hub, if the model will be there: the name to load it by, org/name or org/name@branch
    """
    parts = list(_parts(plan, inputs))
    named = {m.ref: m.revision for m, _ in _models(plan, inputs)}
    models = "\n".join(
        f"* {_linked(ref, commit)}{f' at {markdown(commit)}' if commit else ''}" for ref, commit in named.items()
    )
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", plan.recipe)), default=0))
    return f"""---
{yaml.safe_dump(_front(plan, parts), sort_keys=False, allow_unicode=True).strip()}
---

# {markdown(name)}

{_sentences(plan.provenance.title)}

{_sentences(plan.provenance.source)}
{_quantised(plan)}{_usage(plan, inputs, *(repo.split("@") if repo else [name]))}
## Models

{models}
{_licences(parts)}
## Recipe

{fence}yaml
{plan.recipe.strip()}
{fence}
{_moved(plan, distance)}{section}{_citation(plan)}"""


def _models(plan: Plan, inputs: Sequence[Checkpoint]) -> Iterator[tuple[ModelInput, Checkpoint | None]]:
    """The models; of a merge that is computed on the way, its own. None: not among `inputs`."""
    for number, model in enumerate(plan.models):
        checkpoint = inputs[number] if number < len(inputs) else None
        if model.plan is None:
            yield model, checkpoint
        else:
            from weightsmith._engine.computed import computed_source

            source = None if checkpoint is None else computed_source(checkpoint)
            yield from _models(model.plan, () if source is None else source.inputs)


def _parts(plan: Plan, inputs: Sequence[Checkpoint]) -> Iterator[_CardPart]:
    for model, checkpoint in dict(_models(plan, inputs)).items():
        cards = []
        if checkpoint is not None:
            folders = list(dict.fromkeys(path.parent for path in checkpoint.paths))
            cards = [checkpoint.card, *map(read_card, folders[1:])]  # of the model, and of an adapter that is applied
        for ref, commit, card in zip_longest(model.ref.split("+"), model.revision.split("+"), cards):
            if ref:
                name = ref.removeprefix("hf://")
                yield _CardPart(name, _is_on_hub(name, commit), card or {})


_LIBRARIES = {PEFT: "peft", DIFFUSERS_LORA: "diffusers", MLX_ADAPTER: "mlx"}
"""Container of an adapter → the library that loads it, as the Hub names it."""
_SHARED_KEYS = ("pipeline_tag", "language")
_ENCODERS = "config_sentence_transformers.json"
_ENCODER_CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""PEFT's `task_type` → the class of the base."""


def _library(plan: Plan) -> str:
    """The library that loads the output, as the Hub names it; "" where none does, or none is known."""
    if plan.container in _LIBRARIES:
        return _LIBRARIES[plan.container]
    if plan.container != SAFETENSORS:
        return "" if plan.config is None else "gguf"
    names = {*plan.carried, *plan.files}
    if plan.config is None:
        return "diffusers" if PIPELINE in names else ""
    if of_diffusers(plan.config):
        return "diffusers"
    engines = _engines(plan)
    if engines and "transformers" not in engines:
        return "mlx" if "mlx-lm" in engines else ""
    return "sentence-transformers" if {MODULES, _ENCODERS} & names else "transformers"


def _engines(plan: Plan) -> dict[str, str]:
    """The programs that load the format of the output, with their titles; {} for plain weights, and where that is not known."""
    from weightsmith._models.formats.engines import engines_of

    return {engine.name: engine.title for engine in engines_of(plan.provenance.format)} if plan.provenance.format else {}


def _shared(parts: Sequence[_CardPart]) -> dict[str, Any]:
    """What the inputs' cards say of task and language, as far as those that say something agree."""
    shared = {}
    for key in _SHARED_KEYS:
        values = [part.card[key] for part in parts if key in part.card]
        listed = values[0] if values and isinstance(values[0], list) else values[:1]
        if listed and all(value == values[0] for value in values) and all(map(_is_plain, listed)):
            shared[key] = values[0]
    return shared


def _front(plan: Plan, parts: Sequence[_CardPart]) -> dict[str, Any]:
    front: dict[str, Any] = {}
    made_from = parts if plan.container != PEFT else [_base_of_adapter(plan)]
    if bases := list(dict.fromkeys(base for part in made_from for base in part.bases)):
        front = {"base_model": bases} | ({"base_model_relation": plan.provenance.relation} if plan.provenance.relation else {})
    licences = {part.licence for part in parts}
    if len(licences) == 1:
        front |= {key: value for key, value in zip(_LICENCE_KEYS, licences.pop(), strict=False) if value}
    if library := _library(plan):
        front["library_name"] = library
    if plan.container not in ADAPTERS and _architecture(plan).endswith("ForCausalLM"):
        front["pipeline_tag"] = "text-generation"
    front |= _shared(parts)
    tags = [plan.provenance.relation, "weightsmith", plan.provenance.name.rpartition(":")[2]]
    tags += ["lora"] if plan.container in ADAPTERS else []
    return {**front, "tags": list(dict.fromkeys(filter(None, tags)))}


def _licences(parts: Sequence[_CardPart]) -> str:
    """What the inputs' cards say. A licence that all have is in the front matter too; of several, none is chosen."""
    if not any(part.licence for part in parts):
        return ""
    named = {part.linked: " ".join(f"`{text}`" for text in part.licence if text) or "its card names none" for part in parts}
    return "\n## Licences of the inputs\n\n" + "\n".join(f"* {linked}: {text}" for linked, text in named.items()) + "\n"


def _usage(plan: Plan, inputs: Sequence[Checkpoint], name: str, branch: str = "") -> str:
    """How to load it; "" where that is not known."""
    at = f", revision={json.dumps(branch)}" if branch else ""
    if plan.container == PEFT:
        usage = _with_peft(plan, name, at)
    elif plan.container == DIFFUSERS_LORA:
        usage = _block("python", f"pipeline.load_lora_weights({_quoted(name)}{at})")
    elif plan.container == MLX_ADAPTER:
        usage = _block("bash", f"mlx_lm.generate --model BASE --adapter-path {_shell_word(name)} --prompt Hello")
    elif plan.container == GGUF_ADAPTER:
        file = _shell_word(f"{name}/{plan.layout.shards[0].name}")
        usage = _block("bash", f"llama-cli -m base.gguf --lora {file}")
    else:
        usage = _with_gguf(plan, name) if plan.container == GGUF else _with_library(plan, inputs, name, at)
    return f"\n## Usage\n\n{usage}\n" if usage else ""


def _block(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _with_gguf(plan: Plan, name: str) -> str:
    """How ComfyUI or llama.cpp loads it."""
    from weightsmith._models.formats.gguf.layout import holds_diffusion

    text = holds_diffusion(plan.header, ("t5encoder",))
    if text or holds_diffusion(plan.header):
        folder, node = ("text_encoders", "CLIPLoader (GGUF)") if text else ("diffusion_models", "Unet Loader (GGUF)")
        move = f"Move `{plan.layout.shards[0].name}` into `models/{folder}` of ComfyUI"
        return f"{move}, and load it with the node *{node}* of [ComfyUI-GGUF](https://github.com/city96/ComfyUI-GGUF)."
    files = [_shell_word(f"{name}/{shard.name}") for shard in plan.layout.shards]
    if plan.mmproj:
        return _block("bash", f"llama-mtmd-cli -m {files[0]} --mmproj {files[-1]} --image photo.jpg")
    return _block("bash", f"llama-cli -m {files[0]}")


def _with_peft(plan: Plan, name: str, at: str) -> str:
    """How PEFT loads an adapter. at: the argument for its branch."""
    base, loader = json.dumps(_base_of_adapter(plan).ref), _TASKS.get(str((plan.config or {}).get("task_type")))
    model = f"model = PeftModel.from_pretrained(base, {_quoted(name)}{at})"
    if loader is None:
        return _block("python", "from peft import PeftModel", "", f"# base: the model {base}, loaded with its own class", model)
    return _block(
        "python",
        "from peft import PeftModel",
        f"from transformers import {loader}",
        "",
        f'base = {loader}.from_pretrained({base}, dtype="auto", device_map="auto")',
        model,
    )


def _with_library(plan: Plan, inputs: Sequence[Checkpoint], name: str, at: str) -> str:
    """How a model in safetensors files is loaded; "" where that is not known. at: the argument for its branch."""
    library, engines, names = _library(plan), _engines(plan), {*plan.carried, *plan.files}
    if library == "diffusers":
        return _with_diffusers(plan, name, at)
    if library == "mlx":
        program = "mlx_vlm" if names.intersection(_PROCESSORS) else "mlx_lm"
        return _block("bash", f"{program}.generate --model {_shell_word(name)} --prompt Hello")
    if library == "sentence-transformers":
        settings = settings_in(plan.files.get(_ENCODERS, b"{}"))
        if plan.donor < len(inputs):
            settings = settings_of(inputs[plan.donor].folder, plan.carried, _ENCODERS) or settings
        stated = settings.get("model_type")
        loader = str(stated) if stated in _ENCODER_CLASSES else _ENCODER_CLASSES[0]
        argument = ", trust_remote_code=True" if "auto_map" in (plan.config or {}) else ""
        lines = [f"from sentence_transformers import {loader}", "", f"model = {loader}({_quoted(name)}{at}{argument})"]
        return _block("python", *lines)
    if engines and "transformers" not in engines:
        return f"Programs that load it: {', '.join(engines.values())}."
    return _with_transformers(plan, name, at)


def _with_diffusers(plan: Plan, name: str, at: str) -> str:
    """How diffusers loads a pipeline, or one of its networks; "" for a class without a usual name."""
    loader = "DiffusionPipeline" if plan.config is None else str(plan.config.get("_class_name"))
    if not loader.isidentifier():
        return ""
    dtype = main_dtype(spec for shard in plan.layout.shards for spec in shard.tensors)
    argument = "" if dtype is None else f", torch_dtype=torch.{dtype.torch}"
    target = "pipeline" if plan.config is None else "model"
    imports = [*(["import torch"] if argument else []), f"from diffusers import {loader}"]
    return _block("python", *imports, "", f"{target} = {loader}.from_pretrained({_quoted(name)}{at}{argument})")


def _with_transformers(plan: Plan, name: str, at: str) -> str:
    """How transformers loads it; "" where that is not known. at: the argument for its branch."""
    architecture, custom = _architecture(plan), "auto_map" in (plan.config or {})
    if not architecture.isidentifier():
        return ""
    loader = "AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else "AutoModel" if custom else architecture
    argument = ", trust_remote_code=True" if custom else ""
    files = (*plan.carried, *plan.files)
    tokenizer = any(file.startswith(("tokenizer", "vocab", "spiece", "tekken")) for file in files)
    helper = "Processor" if {*files}.intersection(_PROCESSORS) else "Tokenizer" if tokenizer else ""
    lines = [f"from transformers import {', '.join(sorted([loader, *([f'Auto{helper}'] if helper else [])]))}", ""]
    if helper:
        lines.append(f"{helper.lower()} = Auto{helper}.from_pretrained({_quoted(name)}{at}{argument})")
    lines.append(f'model = {loader}.from_pretrained({_quoted(name)}{at}, dtype="auto", device_map="auto"{argument})')
    if helper == "Tokenizer" and loader == "AutoModelForCausalLM":
        lines += [
            'inputs = tokenizer("Hello", return_tensors="pt").to(model.device)',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))",
        ]
    return _block("python", *lines)


def _base_of_adapter(plan: Plan) -> _CardPart:
    """The model that an adapter is for."""
    name = str((plan.config or {}).get("base_model_name_or_path") or "")
    local = expand_user(name)
    return _CardPart(name, not exists(local) and _HUB_ID.fullmatch(name) is not None, read_card(local))


def _architecture(plan: Plan) -> str:
    listed = (plan.config or {}).get("architectures")
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else ""


def _sources(plan: Plan) -> Iterator[str]:
    yield plan.provenance.source
    for model in plan.models:
        yield from () if model.plan is None else _sources(model.plan)


def _citation(plan: Plan) -> str:
    entries = cite("\n".join(_sources(plan)))
    if not entries:
        return ""
    return "\n## Citation\n\n```bibtex\n" + "\n\n".join(entries) + "\n```\n"


def _quantised(plan: Plan) -> str:
    if not plan.provenance.format:
        return ""
    if plan.container == GGUF:
        shards = plan.layout.shards
        count = len(shards) - bool(plan.mmproj)
        text = f"\nStored as {markdown(plan.provenance.format)}. Types of the tensors: {_types(shards[:count])}"
        return text + "".join(f"; in {shard.name}, for images: {_types([shard])}" for shard in shards[count:]) + ".\n"
    from weightsmith._features.quantisation.calibration.weights import by_weight

    steps = by_weight(plan).steps
    number = sum(step.family != PLAIN for step in steps)
    return f"\nQuantised: {markdown(plan.provenance.format)}{f' ({number:,} of {len(steps):,} tensors)' if number else ''}.\n"


def _types(shards: Iterable[ShardLayout]) -> str:
    """Count tensors by type: `12 F16, 3 F32`."""
    counts = Counter(spec.dtype.name for shard in shards for spec in shard.tensors)
    return ", ".join(f"{number:,} {name}" for name, number in counts.most_common())


def _moved(plan: Plan, distance: tuple[Moved, ...]) -> str:
    if not distance:
        return ""
    what = f"Frobenius norms of merged - base{_sentences(plan.provenance.distance)}."
    if plan.copies_codes:
        what += " Weights whose codes are copied from an input do not count."
    return f"\n## Distance from the base\n\n{what}\n\n{to_markdown(distance)}\n"


def _is_plain(value: object) -> bool:
    """Text from an input's card that is safe to repeat in this one."""
    return isinstance(value, str) and _VALUE.fullmatch(value) is not None


def _linked(ref: str, commit: str) -> str:
    """A model in Markdown; with a link if it has a commit, as models of the Hub have."""
    ref = ref.removeprefix("hf://")
    return _CardPart(ref, _is_on_hub(ref, commit), {}).linked


def _is_on_hub(ref: str, commit: str) -> bool:
    """A model with a commit, as those of the Hub have; and a name that is no markup, whoever wrote the plan."""
    return bool(commit) and _HUB_REF.fullmatch(ref) is not None


def _sentences(text: str) -> str:
    """Text of a method, or of a plan that somebody else made: one paragraph without HTML."""
    return printable(redacted(" ".join(text.split()))).replace("<", "&lt;")


def _quoted(name: str) -> str:
    """A folder's name as Python writes it; with escapes only where letters cannot be seen."""
    return json.dumps(name, ensure_ascii=not name.isprintable())


def _shell_word(path: str) -> str:
    """A path as one word of a shell's command line; with escapes only where letters cannot be seen."""
    return shlex.quote(printable(path))


# ---- BibTeX, from `citations.bib`: the text in which a method names its sources finds the entries

_ENTRY = re.compile(r"(?:% named: ([^\n]+)\n)?(@\w+\{.+?\n\})", re.DOTALL)
_EPRINT = re.compile(r"eprint += \{(.+)\}")


def cite(source: str) -> list[str]:
    """The entries of the papers that a text names, in its order.

    >>> print(cite("Jang et al. 2024, Model Stock, https://arxiv.org/abs/2403.19522")[0])
    @misc{jang2024model,
      title         = {{Model Stock}: All We Need Is Just a Few Fine-Tuned Models},
      author        = {Dong-Hwan Jang and Sangdoo Yun and Dongyoon Han},
      year          = {2024},
      eprint        = {2403.19522},
      archivePrefix = {arXiv},
    }
    """
    entry_at = {source.index(words): entry for words, entry in entries().items() if words in source}
    return [entry_at[place] for place in sorted(entry_at)]


@cache
def entries() -> dict[str, str]:
    """Every entry, by the words with which sources name it."""
    text = Path(__file__).with_name("citations.bib").read_text("utf-8")
    return {words or f"arxiv.org/abs/{_EPRINT.findall(entry)[0]}": entry for words, entry in _ENTRY.findall(text)}
