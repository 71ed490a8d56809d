"""What people type who come from other programs, and what to type here: tables of commands and options that do not exist.

mergekit's flags have a table of their own (`mergekit_flags.py`); what is spelt wrong is answered by `nearest`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

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

_RECIPE_KEY = "write {name}: in the recipe. For a single run: --set {name}=VALUE"

LORA_FLAGS = ("--lora", "--adapter", "--lora-path")
OUT_FLAGS = ("-o", "--out", "--output", "--outfile", "--out-dir", "--output-dir", "--save", "--out_path")
OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(OUT_FLAGS, "write OUT without a flag, as in the usage"),
    **dict.fromkeys(("-f", "-c", "--file", "--config", "--yaml", "-i", "--input"), "write RECIPE without a flag"),
    **dict.fromkeys(("--method", "--merge-method", "-m"), "write merge_method: in the recipe; weightsmith methods lists all"),
    **{f"--{name}": _RECIPE_KEY.format(name=name) for name in ("weight", "density", "lambda", "t", "epsilon", "gamma")},
    "--alpha": "write weight: in the recipe, or t: for slerp. For a single run: --set weight=VALUE",
    **dict.fromkeys(
        ("--models", "--base"), "write models into the recipe: weightsmith init --base MODEL --model MODEL writes one"
    ),
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
    **dict.fromkeys(("--resume", "--continue"), "repeat the command that was interrupted: it resumes by itself"),
}
"""Option → the next step. Only for options that the command does not have."""

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


def for_option(option: str, known: Sequence[str], arguments: Sequence[str]) -> str:
    """The next step for an option that a command does not have, or an empty string. arguments: names of those it takes.

    >>> for_option("--outtype", ["--format"], ["MODEL", "OUT"])
    'use --format FORMAT, such as gguf-q8_0; weightsmith quantize --list lists all'
    >>> for_option("--dtype", ["--out-dtype"], []), for_option("--dtype", [], [])
    ('use --out-dtype DTYPE, such as bfloat16', '')
    """
    if option in _FORMATS:
        flag = next((name for name in ("--format", "--quantize") if name in known), "")
        return _FORMAT.format(flag=flag, example=_FORMATS[option]) if flag else ""
    answer = OPTIONS.get(option, "")
    needed = [word.rstrip(".,;:=") for word in answer.split() if word.startswith("--")][:1]
    if answer.startswith("use --") and needed and needed[0] not in (*known, "--help"):
        return ""
    for word in ("OUT", "RECIPE"):
        if answer.startswith(f"write {word} ") and word not in arguments:
            return "use --report FILE.html" if word == "OUT" and "--report" in known else ""
    return answer


def for_models(models: Sequence[str], out: str) -> str:
    """The next step where models stand in place of a recipe.

    >>> for_models(["a", "b"], "out")
    'write a recipe first: weightsmith init --goal blend --model a --model b, then run weightsmith merge recipe.yml out'
    """
    goal = "blend" if len(models) == 2 else "average"
    command = [
        "weightsmith",
        "init",
        *(["--goal", goal] if len(models) > 1 else []),
        *(w for m in models for w in ("--model", m)),
    ]
    return f"write a recipe first: {shlex.join(command)}, then run {shlex.join(['weightsmith', 'merge', 'recipe.yml', out])}"
