"""Patterns of `rank_pattern` and `alpha_pattern`: untrusted regular expressions, matched in linear time.

PEFT matches the end of a module's name, `(.*\\.)?(PATTERN)$`, and takes the first pattern that fits. Python's `re` may take for
ever to do so: `a?a?a?…aaa` and `(a|a)(a|a)…` are exponential. Here most patterns are module names and are looked up in a
dict; RE2, whose time is linear in the name, matches the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import show
from weightsmith._models.structure.vocabulary import EMBEDDINGS

# ---- How the factors of all experts of a parameter are stored: what the config says, where shapes do not tell


GROUPED = "grouped_by_expert"
RANK_MAJOR = "rank_major"

_FLAT, _DETAILS = "lora_B_layout", "unsloth_fused_expert_lora"
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(\.dev\d{0,4})?(@.*)?", re.ASCII | re.DOTALL)
_SAYING_SO = (0, 18, 0)  # the first PEFT that writes `peft_version`
_KNOWING = (0, 19, 1)
_FIX = f"Write {_FLAT}: {RANK_MAJOR} (PEFT's) or {GROUPED} into adapter_config.json, as the adapter was trained."

KNOWS_ORDER = ".".join(map(str, _KNOWING))
"""The first version of PEFT that knows which models have [experts, inputs, outputs]."""

INPUTS_FIRST = frozenset({"gpt_oss", "openai_privacy_filter", "aria"})
"""Types of models of which PEFT knows, from transformers' `is_transposed`, that they have [experts, inputs, outputs]."""


class Layouts:
    """The layout of B of each parameter that a config names."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        """Raises FormatError for what contradicts itself, Unsupported for layouts that are not known."""
        self._where = where
        self._all = config.get(_FLAT)
        details = _object(config.get(_DETAILS), _DETAILS, where)
        parameters = _object(details.get("parameters"), f"parameters of {_DETAILS}", where)
        entries = {name: _object(entry, f"{name} of {_DETAILS}", where) for name, entry in parameters.items()}
        self._own = {name: entry.get(_FLAT) for name, entry in entries.items()}
        for key, layout in (
            (_FLAT, self._all),
            *((f"{_FLAT} of {name}", layout_of_parameter) for name, layout_of_parameter in self._own.items()),
        ):
            if layout not in (None, GROUPED, RANK_MAJOR):
                what = f"{key} is {show(layout)}: neither {RANK_MAJOR} nor {GROUPED}"
                raise Unsupported(what, where=where, fix="Merge the adapter with the program that wrote it.")
            if None not in (layout, self._all) and layout != self._all:
                what = f"{key} is {layout}, and {_FLAT} is {self._all}"
                raise FormatError(what, where=where, fix=_FIX)
        if (of_a := details.get("lora_A_layout")) not in (None, GROUPED):
            what = f"lora_A_layout of {_DETAILS} is {show(of_a)}, not {GROUPED}"
            raise Unsupported(what, where=where, fix="Merge the adapter with the program that wrote it.")
        mapping = config.get("auto_mapping")
        self._unsloth = isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed"))

    def grouped(self, parameter: str) -> bool:
        """Whether the experts lie one after the other in B. parameter: its name without the module's"""
        return (self._own.get(parameter) or self._all) == GROUPED

    def check(self, module: str, parameter: str) -> None:
        """Raise Unsupported for factors of several experts and ranks that Unsloth saved before it said which layout it has."""
        if self._unsloth and parameter in ("gate_up_proj", "down_proj") and not (self._own.get(parameter) or self._all):
            what = f"{module}.{parameter}: Unsloth saved it without {_FLAT}, and its versions differ in the order of B"
            why = f"Those before September 2026 trained with {GROUPED}; PEFT reads {RANK_MAJOR}"
            raise Unsupported(what, where=self._where, details=[why], fix=_FIX)


def _object(value: object, what: str, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"{what} is {show(value)}, not an object", where=where, fix="Repair it, or download it again.")
    return value


def transposed_of(version: object, model_type: object) -> bool | None:
    """Whether PEFT took parameters for [experts, inputs, outputs] as it trained an adapter; None if that is not known.

    version     peft_version of the adapter
    model_type  of the base

    >>> transposed_of("0.18.1", "nemotron_h"), transposed_of("0.21.0", "nemotron_h"), transposed_of("0.21.0", "gpt_oss")
    (True, False, None)
    """
    parsed = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if parsed is None:  # PEFT 0.17, or a config that PEFT did not write
        return None
    release, dev = tuple(int(part) for part in parsed.groups()[:3]), bool(parsed[4])
    if release < _SAYING_SO or (dev and release <= _KNOWING) or not isinstance(model_type, str):
        return None
    if release < (0, 19, 0):
        return True
    # For the others, the version of transformers matters too, and it is not known.
    return None if model_type in INPUTS_FIRST else release < _KNOWING


# ---- Every key of adapter_config.json, and every kind of PEFT adapter: what each means for the weights


MERGE_WITH_PEFT = "Merge it with peft (merge_and_unload, then save_pretrained), and name that folder."
REPAIR = "Repair it, or download the adapter again."

USED = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",  # Unsloth marks its adapters there
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "lora_bias",
        "lora_B_layout",  # Unsloth's
        "modules_to_save",
        "peft_type",
        "peft_version",
        "r",
        "rank_pattern",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "unsloth_fused_expert_lora",  # Unsloth's
        "use_dora",
        "use_rslora",
    }
)

WITHOUT_EFFECT = frozenset(
    {
        "corda_config",  # of initialisations: `init_lora_weights` says whether one was used
        "eva_config",
        "exclude_modules",  # which modules have factors is seen in the file
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "merge_weights",  # of PEFT up to 0.2: whether `eval()` merges
        "qalora_group_size",  # without `use_qalora`
        "revision",
        "runtime_config",
        "target_modules",
        "velora_config",  # changes the backward pass alone
    }
)


@dataclass(frozen=True, slots=True)
class NotApplied:
    """Why a setting is refused. by_peft: PEFT can merge it"""

    why: str
    by_peft: bool = True


NOT_APPLIED: Mapping[str, NotApplied] = {
    "use_qalora": NotApplied("QA-LoRA, which pools the inputs of A"),
    "use_bdlora": NotApplied("block-diagonal factors", by_peft=False),
    "layer_replication": NotApplied("layers that are repeated before the adapter is applied, and share weights", by_peft=False),
    "alora_invocation_tokens": NotApplied("an activated LoRA, which is on for some tokens only", by_peft=False),
    "arrow_config": NotApplied("Arrow routing between several adapters", by_peft=False),
    "kasa_config": NotApplied("KaSA, which changes the base weights"),
    "monteclora_config": NotApplied("MonteCLoRA's sampled factors"),
    "megatron_config": NotApplied("layers of Megatron, which are split between devices"),
    "enable_lora": NotApplied("factors of some parts of a layer, as PEFT up to 0.2 had them", by_peft=False),
}
"""Settings with which B @ A is not all that the adapter does; each must be false, none or empty."""

PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base weights alone."""

CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Those that subtract their first B @ A from the base weights: the adapter is to that residual, which is not in any file."""

BIASES = ("none", "all", "lora_only")
TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")

CONVERTED_KINDS = frozenset(
    "C3A DELORA FOURIERFT GRALORA LOHA LOKR MISS PSOFT RANDLORA TINYLORA UNILORA VBLORA VERA WAVEFT".split()
)
"""Types that `peft.convert_to_lora` converts (PEFT 0.21)."""

MERGED_KINDS = frozenset(
    "ADALORA ADAMSS BEFT BOFT DEFT FROD GLORA HIRA HRA IA3 LN_TUNING OFT OSF PEANUT PVERA ROAD SHIRA SUPERTUNING "
    "TRAINABLE_TOKENS".split()
)
"""Types that PEFT cannot convert, and merges."""

UNMERGED_KINDS = frozenset(
    "ADAPTION_PROMPT CARTRIDGE CPT LILY MULTITASK_PROMPT_TUNING POLY PREFIX_TUNING PROMPT_TUNING P_TUNING SHADOW XLORA".split()
)
"""Types that are no change of weights: prompts, routers and modules beside the model."""


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise Unsupported for an adapter that is not plain LoRA, with every reason, FormatError for values of a wrong type."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise Unsupported(f"an adapter of peft_type {show(kind)}, not LORA", where=where, fix=_fix_of_kind(kind))
    reasons = dict(_not_applied(config))
    unknown = [f"{show(key)}: {show(value)}" for key, value in config.items() if _unknown(key, value)]
    if reasons:
        fix = MERGE_WITH_PEFT if all(reasons.values()) else "Use the adapter with peft, which cannot merge it either."
        what = "the adapter does more than LoRA, and would be applied wrongly"
        raise Unsupported(what, where=where, details=[*reasons, *unknown], fix=fix)
    if unknown:
        what = "keys that weightsmith does not know may change what the adapter's factors mean"
        fix = "Merge the adapter with the program that wrote it. If a key changes no weights, remove it from the file."
        raise Unsupported(what, where=where, details=unknown, fix=fix)
    if problems := list(_wrong_values(config)):
        raise FormatError("values that PEFT does not know", where=where, details=problems, fix=REPAIR)


def _unknown(key: str, value: object) -> bool:
    """Whether a key may mean anything: new settings of PEFT are none, false or empty unless they are used."""
    return bool(value) and key not in USED | WITHOUT_EFFECT and key not in NOT_APPLIED


def _not_applied(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Reason → whether PEFT can merge the adapter all the same."""
    for key, reason in NOT_APPLIED.items():
        if config.get(key):
            yield f"{key}: {reason.why}", reason.by_peft
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(CHANGING_INITS):
        yield f"init_lora_weights: {show(init)}: the base weights were changed before training", True


def _wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    """What PEFT would not have written."""
    for key in ("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_rslora"):
        if not isinstance(value := config.get(key), bool | None):
            yield f"{key} is {show(value)}, not true or false"
    if (bias := config.get("bias")) not in (None, *BIASES):
        yield f"bias is {show(bias)}, none of {', '.join(BIASES)}"
    if (init := config.get("init_lora_weights")) is not None and init not in PLAIN_INITS:
        yield f"init_lora_weights is {show(init)}: whether it changes the base weights is not known"
    if (task := config.get("task_type")) not in (None, *TASKS):
        yield f"task_type is {show(task)}, none of {', '.join(TASKS)}"
    saved = config.get("modules_to_save")
    if saved is not None and not (isinstance(saved, list) and all(isinstance(name, str) for name in saved)):
        yield f"modules_to_save is {show(saved)}, not a list of names"


_TIED_BY_PEFT = frozenset({"embed_tokens", "lm_head"})
"""The last names of modules for which PEFT follows `ensure_weight_tying`."""


def has_one_vocabulary(config: Mapping[str, Any], modules: Collection[str]) -> bool:
    """Whether PEFT trained embedding and head as one tensor, provided that the base ties them. modules: those in the file.

    `ensure_weight_tying` alone is not enough: PEFT follows it only if the config lists `embed_tokens` or `lm_head`. With
    `word_embeddings` or `wte`, the head stays as it was. If the config has a pattern, the file tells: PEFT saves both modules.

    >>> config = {"ensure_weight_tying": True, "target_modules": ["wte"]}
    >>> has_one_vocabulary(config, ["transformer.wte"]), has_one_vocabulary(config, ["transformer.wte", "lm_head"])
    (False, True)
    """
    if config.get("ensure_weight_tying") is not True:
        return False
    targets, saved = config.get("target_modules"), config.get("modules_to_save")
    listed = [*(targets if isinstance(targets, list) else ()), *(saved if isinstance(saved, list) else ())]
    if _TIED_BY_PEFT.intersection(map(_last_name, listed)):
        return True
    trained = [name for name in map(_last_name, modules) if name in (*EMBEDDINGS, *_TIED_BY_PEFT)]
    if isinstance(targets, str):
        return "lm_head" in trained and len(trained) > 1
    return not _TIED_BY_PEFT.isdisjoint(trained)


def tied_targets(targets: Sequence[str]) -> list[str]:
    """`target_modules` with which PEFT follows `ensure_weight_tying`: the head is added if they lack both modules."""
    return [*targets] if _TIED_BY_PEFT.intersection(map(_last_name, targets)) else [*targets, "lm_head"]


def _last_name(module: object) -> str:
    return str(module).rpartition(".")[2]


def _fix_of_kind(kind: object) -> str:
    """What to do with an adapter of another type."""
    if not isinstance(kind, str):
        return "Name a folder that PEFT's save_pretrained has written."
    if kind in CONVERTED_KINDS:
        return f"Convert it with peft's convert_to_lora, and name the folder of the result. Or: {MERGE_WITH_PEFT}"
    if kind in MERGED_KINDS:
        return MERGE_WITH_PEFT
    if kind in UNMERGED_KINDS:
        return "Use the adapter with peft: it is no change of weights, so neither peft nor weightsmith can merge it."
    return "Merge it with the program that wrote it, and name the folder of the result."


MAX_LENGTH = 1000
"""Characters of a pattern that is no plain name."""
MAX_PATTERNS = 100
"""Patterns that are no plain names."""
MAX_STEPS = 20_000_000
"""The most steps for all names and patterns: about 5 s."""
INSTRUCTIONS = 50
"""Size of a compiled pattern that counts as one step for each character of a name."""
_MAX_GROUPS = 1000  # of plain names with equal lengths and dots: 30 in an adapter of a large mixture of experts

_PLAIN = re.compile(r"\^?[\w.-]+\$?", re.ASCII)
_DIFFERENT = re.compile(r"\\[^\W_dDwWsS]|\(\?(?!:)|\[:|\{,\d")
"""Syntax that RE2 and Python's `re` do not read alike: other escapes, flags, character classes, `{,2}`."""


class ModulePatterns:
    """Numbers by pattern: the first pattern that fits a module's name decides."""

    def __init__(self, numbers: Mapping[str, float], key: str, where: str) -> None:
        """key: of the config; where: for messages. Raises FormatError."""
        self._key, self._where = key, where
        self._numbers = list(numbers.values())
        # (length, places of dots, whole) → name → number
        self._names: dict[tuple[int, tuple[int, ...], bool], dict[str, int]] = {}
        self._others: dict[int, Any] = {}
        self._left = MAX_STEPS
        for number, text in enumerate(numbers):
            if _PLAIN.fullmatch(text):
                name, whole = text.removeprefix("^").removesuffix("$"), text.startswith("^")
                dots = tuple(i for i, c in enumerate(name) if c == ".")
                self._names.setdefault((len(name), dots, whole), {}).setdefault(name, number)
            elif len(self._others) == MAX_PATTERNS:
                raise self._unread(f"more than {MAX_PATTERNS} patterns are no plain names", text)
            else:
                self._others[number] = self._compiled(text)
        if len(self._names) > _MAX_GROUPS:
            raise self._unread("too many different forms of names", next(iter(numbers)))

    def find(self, name: str, otherwise: float) -> float:
        """The number of the first pattern that fits a module's name. Raises FormatError where that takes too long."""
        if self._others and not (name.isascii() and name.isprintable()):  # RE2's classes are those of ASCII
            raise self._unread(f"it is compared with the name {show(name)}, which is not ASCII")
        instructions = sum(pattern.programsize for pattern in self._others.values())
        self._left -= len(self._names) + len(name) * instructions // INSTRUCTIONS
        if self._left < 0:
            raise self._unread("the patterns take too long to match with the names of all modules")
        positions = [n for n in (self._plain(name), self._other(name)) if n is not None]
        return self._numbers[min(positions)] if positions else otherwise

    def _plain(self, name: str) -> int | None:
        """The position of the pattern that is a plain name and fits. A dot in a pattern stands for any character."""
        positions = []
        for (length, dots, whole), names in self._names.items():
            start = len(name) - length
            if start == 0 or (start > 0 and not whole and name[start - 1] == "."):
                part = list(name[start:])
                for i in dots:
                    part[i] = "."
                if (number := names.get("".join(part))) is not None:
                    positions.append(number)
        return min(positions, default=None)

    def _other(self, name: str) -> int | None:
        return next((number for number, pattern in self._others.items() if pattern.fullmatch(name)), None)

    def _compiled(self, text: str) -> Any:
        """RE2's pattern of the names that end so."""
        try:
            return compiled(text, r"(?:.*\.)?")
        except ValueError as error:
            raise self._unread(str(error), text) from None

    def _unread(self, why: str, text: str = "") -> FormatError:
        shown = f" {show(text)}" if text else ""
        fix = "Write the names of the modules in place of the pattern."
        return FormatError(f"{self._key} has a pattern{shown} that is not read: {why}", where=self._where, fix=fix)


def compiled(text: str, before: str = "") -> Any:
    """RE2's pattern of a stranger's regular expression. before: a pattern in front of it.

    Raises ValueError with the reason if RE2 cannot read it, or would read it otherwise than Python's `re`.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"{len(text):,} characters, at most {MAX_LENGTH:,} are read")
    if unsupported := _DIFFERENT.search(text):
        raise ValueError(f"'{unsupported[0]}' is not read")
    import re2

    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    try:
        re2.compile(text, options)  # by itself, because it might close the group
        return re2.compile(f"{before}(?:{text})", options)
    except re2.error as error:
        raise ValueError(error.args[0].decode(errors="replace")) from None
