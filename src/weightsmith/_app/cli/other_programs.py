"""What people type who come from other programs, and what to type here: commands and options of theirs, mergekit's flags.

`nearest` answers misspellings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

RECIPES = (".yml", ".yaml")

_RUN = (
    "run the model elsewhere, for weightsmith only makes it: load its folder with transformers or vLLM, or merge with "
    "--quantize gguf-q4_k_m and run model.gguf in Ollama or llama.cpp"
)
_CONVERT = (
    "use quantize, which also converts: weightsmith quantize MODEL OUT --format gguf-bf16, or gguf-q4_k_m; quantize --list "
    "lists the formats"
)
_UPLOAD = "add --push org/name to merge or quantize. For a finished folder: hf upload org/name FOLDER"
_LORA = "merge an adapter into its base with a recipe: weightsmith init --goal bake"

COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "chat",
            "serve",
            "generate",
            "infer",
            "llama-cli",
            "llama-server",
            "complete",
            "prompt",
            "server",
            "cli",
            "api",
            "llama-bench",
        ),
        _RUN,
    ),
    **dict.fromkeys(
        ("convert", "gguf", "export", "quant", "quantise", "convert_hf_to_gguf.py", "convert-hf-to-gguf", "llama-quantize"),
        _CONVERT,
    ),
    **dict.fromkeys(("upload", "push", "publish"), _UPLOAD),
    **dict.fromkeys(
        ("download", "pull", "fetch"),
        "name the model in a recipe, as org/name or org/name@revision: it is downloaded when needed. To download one alone: "
        "hf download org/name",
    ),
    **dict.fromkeys(
        ("train", "finetune", "fine-tune", "sft"),
        "train with another program, such as TRL or Axolotl: weightsmith merges what it makes",
    ),
    **dict.fromkeys(("lora", "merge-lora", "apply-lora", "bake", "merge-adapter", "export-lora", "llama-export-lora"), _LORA),
    **dict.fromkeys(
        ("convert-lora-to-gguf", "lora-to-gguf", "convert_lora_to_gguf.py"),
        "run weightsmith convert-lora ADAPTER OUT --for llama.cpp --base MODEL",
    ),
    **dict.fromkeys(("extract", "lora-extract"), "run weightsmith extract-lora FINETUNED BASE OUT"),
    **dict.fromkeys(("compare", "cmp", "delta"), "run weightsmith diff MODEL MODEL, or eval to compare their perplexity"),
    **dict.fromkeys(
        ("evaluate", "perplexity", "ppl", "benchmark", "bench", "test", "score", "llama-perplexity"),
        "run weightsmith eval MODEL MODEL --text FILE.txt",
    ),
    **dict.fromkeys(("info", "show", "ls", "view", "cat", "describe", "gguf-dump"), "run weightsmith inspect MODEL"),
    **dict.fromkeys(
        ("list", "algorithms"), "run weightsmith methods for the merge methods, or quantize --list for the formats"
    ),
    **dict.fromkeys(("check", "validate", "lint", "dry-run", "dryrun", "explain"), "run weightsmith plan RECIPE"),
    **dict.fromkeys(("new", "create", "wizard", "start", "recipe", "template"), "run weightsmith init"),
    **dict.fromkeys(("gui", "ui", "web", "webui", "app"), "run weightsmith studio"),
    **dict.fromkeys(("evolve", "search", "optimize", "optimise"), "run weightsmith tune RECIPE OUT --text FILE.txt"),
    **dict.fromkeys(("tokensurgeon", "tokenizer"), "run weightsmith transplant-tokenizer MODEL DONOR OUT"),
    **dict.fromkeys(
        ("imatrix", "llama-imatrix", "calibrate"),
        "run weightsmith quantize MODEL OUT --format gguf-q4_k_m --calibration FILE.txt: it measures importances first, and "
        "writes them as imatrix.dat",
    ),
    **dict.fromkeys(("yaml", "merge-yaml", "megamerge", "multi"), "run weightsmith merge RECIPE OUT"),
    **dict.fromkeys(
        ("pytorch", "merge-pytorch"), "name the weight files as models in a recipe, and run weightsmith merge RECIPE OUT"
    ),
    **dict.fromkeys(
        ("merge-gguf", "gguf-split", "llama-gguf-split"), "run weightsmith merge RECIPE OUT --quantize gguf-q4_k_m"
    ),
    **dict.fromkeys(("mixture", "merge-moe"), "run weightsmith moe RECIPE OUT"),
    **dict.fromkeys(
        ("stack", "frankenmerge", "bakllama"),
        "stack layers with slices in a recipe: see docs/recipe.md, then run weightsmith merge",
    ),
    **dict.fromkeys(("cache", "prune", "clear"), "run weightsmith clean"),
    **dict.fromkeys(
        ("pip", "uv", "uvx", "add", "sync", "install", "tool", "remove", "uninstall", "lock", "venv"),
        "install packages with pip or uv, outside weightsmith: docs/installation.md lists the extras",
    ),
    **dict.fromkeys(("update", "upgrade", "self"), "upgrade weightsmith with pip or uv: see docs/installation.md"),
    **dict.fromkeys(
        ("rm", "delete"), "delete the folder of a model with rm -r FOLDER. For interrupted work: weightsmith clean"
    ),
    **dict.fromkeys(("cp", "copy"), "copy the folder of a model with cp -r FOLDER OTHER"),
    **dict.fromkeys(("ps", "stop"), "press Ctrl-C where the command runs: nothing runs in the background"),
    "version": "run weightsmith --version",
    "info-system": "run weightsmith doctor",
    "resume": "repeat the command that was interrupted: it resumes by itself",
    "batch": "put the recipes into one file, with --- between them, and run weightsmith merge RECIPE OUT",
}
"""Command → the next step."""

_KEEP = ". To write them too: --keep-stages"
_RECIPE_KEY = "write {name}: in the recipe. For a single run: --set {name}=VALUE"

MODEL_FLAGS = ("--models", "--base")
LORA_FLAGS = ("--lora", "--adapter", "--lora-path")
OUT_FLAGS = ("-o", "--out", "--output", "--outfile", "--out-dir", "--output-dir", "--save", "--out_path")
OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(OUT_FLAGS, "write OUT without a flag, as in the usage"),
    **dict.fromkeys(("-f", "-c", "--file", "--config", "--yaml", "-i", "--input"), "write RECIPE without a flag"),
    **dict.fromkeys(("--method", "--merge-method", "-m"), "write merge_method: in the recipe; weightsmith methods lists all"),
    **{f"--{name}": _RECIPE_KEY.format(name=name) for name in ("weight", "density", "lambda", "t", "epsilon", "gamma")},
    "--alpha": "write weight: in the recipe, or t: for slerp. For a single run: --set weight=VALUE",
    **dict.fromkeys(MODEL_FLAGS, "write models into the recipe: weightsmith init --base MODEL --model MODEL writes one"),
    **dict.fromkeys(("--dtype", "--out-type", "--torch-dtype", "--precision"), "use --out-dtype DTYPE, such as bfloat16"),
    **dict.fromkeys(("--fp16", "--half", "--float16"), "use --out-dtype float16"),
    **dict.fromkeys(("--bf16", "--bfloat16"), "use --out-dtype bfloat16"),
    **dict.fromkeys(("--force", "-y", "--yes", "--replace", "--exist-ok", "--clobber"), "use --overwrite"),
    **dict.fromkeys(("--dry-run", "-n", "--dryrun", "--check", "--plan-only"), "use weightsmith plan RECIPE"),
    **dict.fromkeys(("--gpu", "--use-gpu"), "use --device cuda"),
    **dict.fromkeys(("--upload", "--push-to-hub", "--hub", "--repo", "--repo-id"), "use --push org/name"),
    **dict.fromkeys(
        ("--token", "--hf-token", "--api-key"),
        "set the variable HF_TOKEN, or run hf auth login: a token has no place in a command",
    ),
    **dict.fromkeys(("--cache", "--cache-dir"), "set the variable HF_HUB_CACHE"),
    **dict.fromkeys(("--offline", "--local-files-only"), "set the variable HF_HUB_OFFLINE=1"),
    **dict.fromkeys(("-t", "--jobs", "--workers", "--nthreads", "--num-workers"), "use --threads N"),
    **dict.fromkeys(("--memory", "--ram", "--max-ram"), "use --max-memory SIZE, such as 4GB"),
    **dict.fromkeys(("--shard-size", "--max-shard", "--split-max-size"), "use --max-shard-size SIZE, such as 5GB"),
    **dict.fromkeys(("-q", "-s", "--silent", "--no-progress"), "use --quiet"),
    **dict.fromkeys(("--debug", "--trace"), "use --verbose"),
    **dict.fromkeys(("--man",), "use --help-all"),
    **dict.fromkeys(
        LORA_FLAGS,
        "write base+adapter for a model in the recipe: weightsmith init --goal bake writes one",
    ),
    **dict.fromkeys(
        ("--intermediate-dir", "--lazy", "--no-lazy"),
        f"leave it out: the intermediate merges of a recipe are computed on the fly{_KEEP}",
    ),
    **dict.fromkeys(("--resume", "--continue"), "repeat the command that was interrupted: it resumes by itself"),
}
"""Option → the next step. Only for options that the command does not have."""

_TRIALS = {
    "plan": "leave it out: plan computes and writes nothing",
    "run": "leave it out to write OUT; weightsmith plan RECIPE shows what that takes",
}
"""Command → what to do instead of a trial of it."""

RUN_FLAGS = {"-m", "--model", "-p", "--prompt", "-hf", "--hf-repo"}
"""llama.cpp's, without a command before them: `COMMANDS["chat"]` is the answer."""

_FORMAT = "use {flag} FORMAT, such as {example}; weightsmith quantize --list lists all"
_FORMATS = {
    "--outtype": "gguf-q8_0",
    "--gguf": "gguf-q4_k_m",
    "--ftype": "gguf-q4_k_m",
    "--type": "gguf-q4_k_m",
    "--quant": "gguf-q4_k_m",
    "--quantization": "gguf-q4_k_m",
    "--bits": "gptq-4bit",
    "--q-bits": "mlx-4bit",
    "--load-in-4bit": "gptq-4bit",
    "--load-in-8bit": "int8",
    "--fp8": "fp8-dynamic",
    "--awq": "awq-4bit",
    "--gptq": "gptq-4bit",
}
"""Option → a format that it may mean."""


def for_command(name: str, line: Sequence[str], methods: Sequence[str]) -> str:
    """The next step for a command that does not exist, or an empty string. line: the words after `weightsmith`.

    >>> for_command("r.yml", ["r.yml", "out"], [])
    'run weightsmith merge r.yml out'
    >>> for_command("ties", ["ties", "a", "b"], ["ties"])
    'write merge_method: ties in a recipe, and run weightsmith merge RECIPE OUT. See weightsmith methods ties'
    """
    typed = name.casefold()
    if typed == "weightsmith":
        return f"leave out the second weightsmith: {shlex.join(['weightsmith', *line[1:]])}" if len(line) > 1 else ""
    if typed.endswith(RECIPES):
        out = [] if len(line) > 1 else ["OUT"]
        return f"run {shlex.join(['weightsmith', 'merge', *line, *out])}"
    if typed in methods:
        return f"write merge_method: {typed} in a recipe, and run weightsmith merge RECIPE OUT. See weightsmith methods {typed}"
    if typed not in COMMANDS and ("/" in name or Path(name).exists()):
        return f"run {shlex.join(['weightsmith', 'inspect', name])}, or another command: weightsmith --help"
    return COMMANDS.get(typed, "")


def for_option(option: str, known: Sequence[str], arguments: Sequence[str], command: str = "") -> str:
    """The next step for an option that a command does not have, or an empty string.

    known, arguments  the options that it has, and the names of its arguments
    command           its name

    >>> for_option("--outtype", ["--format"], ["MODEL", "OUT"])
    'use --format FORMAT, such as gguf-q8_0; weightsmith quantize --list lists all'
    >>> for_option("--dtype", ["--out-dtype"], []), for_option("--dtype", [], [])
    ('use --out-dtype DTYPE, such as bfloat16', '')
    """
    if option in _FORMATS:
        flag = next((name for name in ("--format", "--quantize") if name in known), "")
        return _FORMAT.format(flag=flag, example=_FORMATS[option]) if flag else ""
    if option == "--format" and "--quantize" in known:
        return "use --quantize FORMAT for the format of the output, and --json for a result in JSON"
    if OPTIONS.get(option) == OPTIONS["--dry-run"] and ("--plan" in known or command in _TRIALS):
        return _TRIALS.get(command, "use --plan")
    if option in (*MODEL_FLAGS, *RUN_FLAGS) and "RECIPE" not in arguments:
        return f"write {' '.join(arguments)} without flags, as in the usage" if "MODEL" in " ".join(arguments) else ""
    answer = OPTIONS.get(option, "")
    if "--keep-stages" not in known:
        answer = answer.removesuffix(_KEEP)
    needed = [word.rstrip(".,;:=") for word in answer.split() if word.startswith("--")][:1]
    if answer.startswith("use --") and needed and needed[0] not in (*known, "--help"):
        return ""
    if option in OUT_FLAGS and "FILE" in arguments:
        return "write FILE without a flag, as in the usage"
    for word in ("OUT", "RECIPE"):
        if answer.startswith(f"write {word} ") and word not in arguments:
            return "use --report FILE.html" if word == "OUT" and "--report" in known else ""
    return answer


def for_models(models: Sequence[str], out: str) -> str:
    """The next step where models stand in place of a recipe.

    >>> for_models(["a", "b"], "out")
    'write a recipe first: weightsmith init --goal blend --model a --model b, then run weightsmith merge recipe.yml out'
    >>> for_models(["a", "my-lora"], "out")[:75]
    'write a recipe first: weightsmith init --goal bake --base a --model my-lora'
    """
    goal = "blend" if len(models) == 2 else "average"
    adapters = [name for name in models if _is_adapter(name)]
    first = ["--goal", goal] if len(models) > 1 else []
    if len(models) == 2 and len(adapters) == 1:
        first = ["--goal", "bake", "--base", *(name for name in models if name not in adapters)]
        models = adapters
    command = ["weightsmith", "init", *first, *(word for name in models for word in ("--model", name))]
    return f"write a recipe first: {shlex.join(command)}, then run {shlex.join(['weightsmith', 'merge', 'recipe.yml', out])}"


def _is_adapter(name: str) -> bool:
    """Whether a model seems to be an adapter, by its name or by its folder. No file is read."""
    return "lora" in name.casefold() or Path(name, "adapter_config.json").exists()


# ---- mergekit's flags: one table for `weightsmith merge` and for the docs
#
# A flag without an effect here is accepted with an answer, one with another name here is passed on, and one that would change
# the result is refused with the next step. So a command line for mergekit-yaml works here, or explains why not.


@dataclass(frozen=True, slots=True)
class Flag:
    """One spelling, or several with one meaning.

    names   as typed
    fate    `accepted`: does nothing; `passed on`: becomes `ours`; `refused`: an error
    answer  one sentence: why it is not needed, what happens instead, or the next step
    value   the flag is followed by a value
    ours    our option; "" with `passed on` when it is what happens anyway
    """

    names: tuple[str, ...]
    fate: Literal["accepted", "passed on", "refused"]
    answer: str
    value: bool = False
    ours: str = ""


def _switch(name: str, answer: str) -> Flag:
    return Flag((f"--{name}", f"--no-{name}"), "accepted", answer)


_CPU = "merging is limited by the disk and runs on the CPU; --device cuda computes whole matrices and hidden states on a GPU"

FLAGS = (
    _switch("clone-tensors", "shared and overlapping storage is always written right, without copies"),
    _switch("lazy-unpickle", "weights are always read piece by piece; pickles are read as data, and never executed"),
    _switch("low-cpu-memory", "memory does not grow with the model; --max-memory limits it"),
    _switch("async-write", "reading, merging and writing always overlap"),
    Flag(("--write-threads",), "accepted", "every thread writes; --threads sets the number of threads", value=True),
    _switch("allow-crimes", "architectures may differ if their tensors match; differences are warnings"),
    Flag(("--copy-tokenizer",), "accepted", "the tokenizer files of the base, else of the first model, are always copied"),
    _switch("cuda", _CPU),
    _switch("read-to-gpu", _CPU),
    _switch("multi-gpu", _CPU),
    _switch("gpu-rich", _CPU),
    Flag(("--safe-serialization",), "accepted", "the output is always safetensors"),
    Flag(("--lora-merge-cache",), "accepted", "adapters are merged while they are read, without a cache", value=True),
    Flag(("--lora-merge-dtype",), "accepted", "arithmetic is always float32 or wider", value=True),
    _switch("trust-remote-code", "a model's own code is copied and never run"),
    Flag(("--no-unsafe-truncate-embeddings",), "accepted", "embeddings are never truncated"),
    Flag(
        ("--transformers-cache",),
        "passed on",
        "folder of the Hub cache, as with the variable HF_HUB_CACHE",
        value=True,
        ours="HF_HUB_CACHE",
    ),
    Flag(("--random-seed",), "passed on", "is --seed", value=True, ours="--seed"),
    Flag(("--num-threads", "-j"), "passed on", "is --threads", value=True, ours="--threads"),
    Flag(
        ("--out-shard-size",),
        "passed on",
        "is --max-shard-size; the k, M and B of mergekit are thousands, millions and billions of bytes",
        value=True,
        ours="--max-shard-size",
    ),
    Flag(("--write-model-card",), "passed on", "is --card, the default", ours="--card"),
    Flag(("--no-write-model-card",), "passed on", "is --no-card", ours="--no-card"),
    Flag(("--no-quiet",), "passed on", "is the default"),
    Flag(
        ("--no-copy-tokenizer",),
        "refused",
        "a checkpoint without its tokenizer is not written; remove the tokenizer files from the output afterwards",
    ),
    Flag(
        ("--no-safe-serialization",),
        "refused",
        "pickled weights are not written; the output is safetensors, which loaders of pickles read too",
    ),
    Flag(
        ("--unsafe-truncate-embeddings",),
        "refused",
        "rows of different vocabularies are not cut to the smallest one; give all models the same tokenizer and "
        "number of embedding rows first",
    ),
)

_GPU_IN_MOE = {"--cuda", "--read-to-gpu", "--multi-gpu", "--gpu-rich"}
_BY_LAYER = "hidden states need the memory of one layer in float32, however large the model is"

MOE_FLAGS = (
    *(flag for flag in FLAGS if not {*flag.names} & _GPU_IN_MOE),
    *(
        _switch(name.removeprefix("--"), "copying is limited by the disk; --device sets the device of hidden states")
        for name in sorted(_GPU_IN_MOE)
    ),
    _switch("load-in-4bit", _BY_LAYER),
    _switch("load-in-8bit", _BY_LAYER),
    _switch("i-understand-this-is-not-useful-without-training", "experts that are all the same are not refused"),
)
"""Those of mergekit-moe. `--device` is ours too, for both, and means the same."""

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_SIZE = re.compile(r"([+-]?\d+)([kmb]?)", re.IGNORECASE | re.ASCII)
_ONE_SHARD = 1 << 62


@dataclass(frozen=True, slots=True)
class Translated:
    """A command line without mergekit's flags.

    args     the remaining arguments, with our options instead of mergekit's
    answers  one line for each flag that is not simply another name of ours
    hub_cache  folder of Hub models, "" for the usual one
    """

    args: list[str]
    answers: tuple[str, ...]
    hub_cache: str = ""


def translate(args: Sequence[str], flags: Sequence[Flag] = FLAGS) -> Translated:
    """Take mergekit's flags out of the arguments of a command. Raises typer.BadParameter for those that are refused.

    >>> translated = translate(["r.yml", "out", "--cuda", "--out-shard-size", "2B", "-j4"])
    >>> translated.args
    ['r.yml', 'out', '--max-shard-size', '2000000000', '--threads', '4']
    >>> translated.answers[0][:24]
    '--cuda is not needed: me'
    """
    by_name = {name: flag for flag in flags for name in flag.names}
    remaining: list[str] = []
    answers: dict[str, None] = {}
    cache = ""
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg == "--":
            remaining += [arg, *queue]
            break
        name, equals, value = _split(arg)
        flag = by_name.get(name)
        if flag is None:
            remaining.append(arg)
            continue
        if flag.fate == "refused":
            raise typer.BadParameter(f"mergekit's {name} is not supported: {flag.answer}.")
        if equals and not flag.value:
            raise typer.BadParameter(f"{name} takes no value.")
        if flag.value and not equals:
            if not queue:
                raise typer.BadParameter(f"{name} needs a value.")
            value = queue.pop(0)
        if flag.fate == "accepted":
            answers[f"{name} is not needed: {flag.answer}."] = None
        elif flag.ours == "HF_HUB_CACHE":
            cache = value
            answers[f"{name}: {flag.answer}."] = None
        elif flag.ours:
            remaining.append(flag.ours)
            if flag.value:
                remaining.append(_shard_size(value) if flag.ours == "--max-shard-size" else value)
    return Translated(remaining, tuple(answers), cache)


def _split(arg: str) -> tuple[str, bool, str]:
    """Name, whether a value is attached, the value: `--a=b`, `-j4`."""
    if arg.startswith("-j") and len(arg) > 2:
        return "-j", True, arg[2:].removeprefix("=")
    name, equals, value = arg.partition("=")
    return name, bool(equals), value


def _shard_size(value: str) -> str:
    match = _SIZE.fullmatch(value)
    if match is None:
        return value  # one of our sizes, or the error of our option
    nbytes = int(match[1]) * _SUFFIXES[match[2].lower()]
    return str(nbytes if nbytes > 0 else _ONE_SHARD)
