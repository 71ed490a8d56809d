"""What the pages say is what the program does.

Conventions of fenced blocks in README.md, CHANGELOG.md and docs/:

* ```` ```console ````: each line that begins with `$ ` is run, the lines after it are all that it prints: warnings and errors,
  then its output; progress is left out. `...` stands for anything, on a line of its own for any number of lines.
* ```` ```python ````: is run. A first line `# NAME.py` puts it into the folder first, for the blocks after it.
* ```` ```yaml ````: a whole recipe, which must plan. A first line `# NAME.yml` puts it into the folder for the commands;
  `# NAME.yml: wrong on purpose` says that it must not plan.
* ```` ```bash ````: is run, and must succeed; what it prints is not compared. README's are not run, nor are blocks that install
  something, name a remote place or call other programs (`ELSEWHERE`), nor those that say why: a line `<!-- not run: REASON -->`
  above the block, or `<!-- commands not run: REASON -->` anywhere on the page. The make targets in it must exist.
* ```` ```text ````: is only shown. Commands in it need such a reason too.

The blocks of one page run in order in one folder with the models `base`, `fr`, `de`, `py` and `over`: the demo's in every
header and size, but full of zeros. There are two tiny pipelines of diffusers, `photo` and `anime`, and two single files of the
same names, too.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli_help import environment
from tests.fork_help import forked
from tests.plan_help import prepare, prepare_moe
from tests.recipe_help import parse
from tests.script_help import load
from weightsmith._activations.own_text import Starts
from weightsmith._base.errors import PlanError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._features.quantisation.formats import FORMATS
from weightsmith._files.containers import make_layout
from weightsmith._methods import all_methods
from weightsmith._planning import recipe as recipes

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRESS = re.compile(
    r"(merging|saving to disk|verifying|checking what is there|decomposing): .*|compiling kernels \(.*\)|reading the .*"
    r"|looking (for|at) .*"
)


# ---- blocks


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line it begins at."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """File name in the first line, or an empty string."""
        match = re.match(r"# ([\w-]+\.(?:yml|py))\b", self.text)
        return match[1] if match else ""

    @property
    def wrong(self) -> bool:
        """A recipe that must not plan."""
        return "wrong on purpose" in self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    language, start, lines = "", 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if start:
                yield Block(page, start, language, "\n".join(lines) + "\n")
                start = 0
            else:
                language, start, lines = line[3:].strip(), number, []
        else:
            lines.append(line)
    assert not start, f"{page}:{start}: a block that does not end"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]

ELSEWHERE = re.compile(
    r"\b(pip|uv|make|docker|ollama|vllm|curl|jupyter|ray|git|python|mergekit-yaml)\b|://|\borg/|\byour-name/|--(push|ray|stream)\b"
)
"""Blocks with these cannot run in a test: they need a network, another program, or a file of the repository."""


def has_command(block: Block) -> bool:
    """Whether a block shows a command of weightsmith."""
    return re.search(r"^(\$ )?weightsmith [a-z]", block.text, re.MULTILINE) is not None


def is_run(block: Block) -> bool:
    """Whether a block of commands is run here."""
    if block.language != "bash" or block.page.parent == ROOT:
        return False
    return not (ELSEWHERE.search(block.text) or says_why_not(block))


def says_why_not(block: Block) -> bool:
    """Whether the page has the reason why a block is not run."""
    lines = block.page.read_text(encoding="utf-8").splitlines()
    above = next((line for line in reversed(lines[: block.line - 1]) if line.strip()), "")
    return bool(re.fullmatch(r"<!-- not run: .{10,} -->", above)) or any(
        re.fullmatch(r"<!-- commands not run: .{10,} -->", line) for line in lines
    )


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def test_every_command_of_a_page_is_run_or_says_why_not() -> None:
    shown = [
        block for block in BLOCKS if block.language in ("bash", "text") and block.page.parent != ROOT and has_command(block)
    ]
    assert [str(block) for block in shown if not (is_run(block) or says_why_not(block) or ELSEWHERE.search(block.text))] == []


def test_a_command_without_a_reason_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```text\nweightsmith verify out\n```\n\n<!-- not run: it takes an hour -->\n\n```bash\nweightsmith doctor\n```\n"
    )
    first, second = blocks_of(page)
    assert (has_command(first), is_run(first), says_why_not(first)) == (True, False, False)
    assert (has_command(second), is_run(second), says_why_not(second)) == (True, False, True)
    page.write_text("```bash\nweightsmith doctor\n```\n\n```bash\npip install weightsmith\n```\n")
    assert [is_run(block) for block in blocks_of(page)] == [True, False]


def test_every_block_has_a_language_that_says_what_is_done_with_it() -> None:
    known = {"console", "python", "yaml", "bash", "text"}
    assert [str(block) for block in BLOCKS if block.language not in known] == []


# ---- the folder


def smollm2() -> list[TensorSpec]:
    """The tensors of SmolLM2-135M."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
    for i in range(30):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{norm}_layernorm.weight": (576,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{part}_proj.weight": (576, 576) for part in "qo"}
        shapes |= {f"{layer}self_attn.{part}_proj.weight": (192, 576) for part in "kv"}
        shapes |= {f"{layer}mlp.{part}_proj.weight": (1536, 576) for part in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (576, 1536)
    return [TensorSpec(name, DTYPES["BF16"], shape) for name, shape in shapes.items()]


CONFIG = (
    """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
"tie_word_embeddings": true, "dtype": "bfloat16"}""".ljust(817)
    + "\n"
)
TOKENIZER = '{"model": {"type": "BPE", "vocab": {"<|im_start|>": 0, "<|im_end|>": 1}, "merges": []}}'.ljust(3522871)
FILES = {"chat_template.jinja": 368, "generation_config.json": 216, "tokenizer.json": 3522871, "tokenizer_config.json": 297}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the demo, as sparse files: they take no room."""
    folder = tmp_path_factory.mktemp("models")
    (shard,) = make_layout(smollm2(), 10**9).shards
    for name in ("base", "fr", "de", "py", "over"):
        (folder / name).mkdir()
        weights = folder / name / "model.safetensors"
        weights.write_bytes(shard.header)
        os.truncate(weights, shard.nbytes)
        (folder / name / "config.json").write_text(CONFIG)
        for file, nbytes in FILES.items():
            (folder / name / file).touch()
            os.truncate(folder / name / file, nbytes)
        (folder / name / "tokenizer.json").write_text(TOKENIZER)
        (folder / name / "tokenizer_config.json").write_text("{}".ljust(297))
    for name in ("photo", "anime"):
        _write_images(folder, name)
    return folder


_UNET = {f"{side}_blocks.{i}.0.in_layers.2.weight": (2, 2) for side in ("input", "output") for i in range(9)}
_SINGLE = {
    **{f"model.diffusion_model.{name}": shape for name, shape in ({"middle_block.1.norm.weight": (2,)} | _UNET).items()},
    "first_stage_model.decoder.conv_in.weight": (2, 2, 3, 3),
    "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight": (2,),
}
_PARTS = {
    "unet/diffusion_pytorch_model": {
        f"{side}_blocks.{i}.resnets.0.conv1.weight": (2, 2) for side in ("down", "up") for i in (0, 1, 2)
    },
    "vae/diffusion_pytorch_model": {"decoder.conv_in.weight": (2, 2, 3, 3)},
    "text_encoder/model": {f"text_model.encoder.layers.{i}.mlp.fc1.weight": (2, 2) for i in (0, 1)},
}


def _write_images(folder: Path, name: str) -> None:
    """A pipeline of diffusers, and a single file, of a model for images."""
    for file, shapes in {f"{name}": _SINGLE, **{f"{name}/{part}": shapes for part, shapes in _PARTS.items()}}.items():
        (shard,) = make_layout([TensorSpec(tensor, DTYPES["F16"], shape) for tensor, shape in shapes.items()], 10**9).shards
        path = folder / f"{file}.safetensors"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(shard.header.ljust(shard.nbytes, b"\0"))
    classes = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
    libraries = {part: ["transformers" if part == "text_encoder" else "diffusers", kind] for part, kind in classes.items()}
    (folder / name / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline", **libraries}))
    for part, kind in classes.items():
        settings = {"model_type": "clip_text_model"} if part == "text_encoder" else {"_class_name": kind}
        (folder / name / part / "config.json").write_text(json.dumps(settings))


@pytest.fixture
def folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the models, as `fr` and as `models/fr`, and three of them as a run's checkpoints."""
    (tmp_path / "models").symlink_to(models)
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    (tmp_path / "run").mkdir()
    for step, name in ((800, "fr"), (900, "de"), (1000, "py")):
        (tmp_path / "run" / f"checkpoint-{step}").symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@cache
def parameter_names() -> list[str]:
    return sorted({p.name for method in all_methods() for p in method.parameters})


# ---- recipes


@pytest.mark.slow
@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_a_recipe_in_the_docs_plans_unless_it_is_wrong_on_purpose(
    block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fr", "de", "all"):
        (folder / f"{name}.txt").write_text("a text of its own kind")
    (folder / "merged").symlink_to(folder / "models/base")
    monkeypatch.setattr("weightsmith._activations.model.rows_of", lambda text, *_: range(text.rows or 10))
    monkeypatch.setattr("weightsmith._activations.model.TextModel.own_starts", lambda *_: Starts(((0,),), ""))
    if block.wrong:
        with pytest.raises(PlanError):
            prepare(block.text)
        return
    if re.search(r"^experts:", block.text, re.M):
        with prepare_moe(block.text) as mixture:
            assert mixture.plan.steps
        return
    if "{tune: " in block.text:
        template = recipes.read_template(block.text)
        with prepare(template.fill(template.start)) as tuned:
            assert tuned.plan.steps
        return
    recipe, problems = parse(block.text, str(block), parameter_names=parameter_names())
    assert recipe is not None
    assert (problems, list(recipe.findings)) == ([], [])
    with prepare(block.text) as prepared:
        assert prepared.plan.steps


@pytest.mark.parametrize(
    "file",
    [*sorted((ROOT / "examples/recipes").glob("*.yml")), *sorted((ROOT / "examples/gallery").glob("*.yml"))],
    ids=lambda file: file.name,
)
def test_the_recipes_of_the_demo_and_the_gallery_plan(file: Path, folder: Path) -> None:
    with prepare(file) as prepared:
        assert prepared.plan.steps


# ---- commands


def run(folder: Path, command: str = "", code: str = "") -> str:
    """What a command or a program in Python prints: stderr without progress, then stdout.

    A copy of this process runs what is of weightsmith alone, and bash the others.
    """
    env = environment(LC_ALL="C")
    parts = shlex.split(command, comments=True)
    if code or (parts[0] == "weightsmith" and not re.search(r"[|<>;&*$]", command)):
        done = forked(lambda: _as_users_do(parts, code), env=env, cwd=folder)
        assert done.code < 70, done.err
        out, err = done.out, done.err
    else:
        out, err = _in_bash(folder, command, env)
    errors = [line for line in err.splitlines() if not PROGRESS.fullmatch(line)]
    return "".join(f"{line}\n" for line in errors) + out


# Whether bytes are on the disk, and what transformers would load, is not what these tests are about; waiting for both is most
# of their time.


def _as_users_do(parts: list[str], code: str) -> None:
    """A command, or a program."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
    sys.modules["transformers"] = None  # type: ignore[assignment]
    sys.path.insert(0, "")
    warnings.simplefilter("error")
    if code:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        from weightsmith._app.cli import main

        sys.argv = parts
        main()


def _in_bash(folder: Path, command: str, env: Mapping[str, str]) -> tuple[str, str]:
    """What bash prints to its two streams."""
    (folder / ".bin").mkdir(exist_ok=True)
    (folder / ".bin" / "sitecustomize.py").write_text(
        "import os, sys\nos.fsync = os.fdatasync = lambda fd: None\nsys.modules['transformers'] = None\n"
    )
    for name, arguments in (("python", ""), ("weightsmith", "-m weightsmith ")):
        program = folder / ".bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        program.chmod(0o755)
    variables = {"PATH": f"{program.parent}:{env['PATH']}", "PYTHONPATH": f"{program.parent}:{env['PYTHONPATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**env, "PYTHONWARNINGS": "error", **variables},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout, done.stderr


def pattern(expected: str) -> re.Pattern[str]:
    """The regular expression of an output with `...` in it."""
    text = ""
    for line in expected.splitlines():
        text += r"(?:.*\n)*?" if line == "..." else ".*?".join(map(re.escape, line.split("..."))) + r"\n"
    return re.compile(text)


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with what it must print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.page == page and (b.language in ("console", "python") or is_run(b)) for b in BLOCKS)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_what_a_page_shows_is_what_the_commands_print(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        if block.language in ("yaml", "python") and block.name:
            (folder / block.name).write_text(block.text)
        if block.language == "python":
            assert run(folder, code=block.text) == "", block
        if is_run(block):
            printed = run(folder, f"set -e\n{block.text}echo it ran\n")
            assert printed.endswith("it ran\n"), f"{block}:\n{printed}"
        for command, expected in sessions(block.text) if block.language == "console" else ():
            printed = run(folder, command)
            assert pattern(expected).fullmatch(printed), f"{block}: $ {command}\nshows:\n{expected}\nprints:\n{printed}"


def write_examples(blocks: list[Block], folder: Path) -> dict[str, Block]:
    """Each block of Python as a file; the blocks by file name."""
    examples = {block.name or f"{block.page.stem.replace('-', '_').lower()}_{block.line}.py": block for block in blocks}
    for name, block in examples.items():
        (folder / name).write_text(block.text)
    assert len(examples) == len(blocks)
    return examples


def type_errors(folder: Path) -> list[str]:
    """What mypy --strict has to say about the files of a folder.

    Except that a function has no types: people write merge methods without, so the pages do.
    """
    pytest.importorskip("mypy")
    options = ["--strict", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache", "--no-error-summary"]
    env = environment(MYPYPATH=str(ROOT / "src"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *sorted(folder.glob("*.py"))],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if not line.endswith("[no-untyped-def]")]


@pytest.mark.slow
def test_every_example_in_python_passes_a_strict_type_checker(tmp_path: Path) -> None:
    examples = write_examples(of_language("python"), tmp_path)
    assert len(examples) > 10
    (tmp_path / "wrong.py").write_text("import weightsmith\n\nweightsmith.open_checkpoint(3)\n")
    wrong, *errors = sorted(type_errors(tmp_path), key=lambda line: not line.startswith("wrong.py:3: error: Argument 1"))
    assert wrong.startswith("wrong.py:3: error: Argument 1")
    assert errors == [], {name: str(block) for name, block in examples.items()}


def test_a_page_that_shows_something_else_is_found() -> None:
    assert pattern("a\n...\nb ... c\n").fullmatch("a\n1\n2\nb 3 c\n")
    assert not pattern("a\n...\nb ... c\n").fullmatch("a\nb 3 d\n")
    assert not pattern("a.c\n").fullmatch("abc\n")
    assert not pattern("a\n").fullmatch("a\nb\n")


# ---- pages


def targets(text: str) -> list[str]:
    """The links and pictures of a page, code left out."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [link or picture for link, picture in re.findall(r'\]\(([^)\s]+)\)|<img [^>]*src="([^"]+)"', prose)]


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings make, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in targets(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page}: {target}"
        assert linked.is_relative_to(ROOT), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{page}: {target}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        queue += [(page.parent / t.partition("#")[0]).resolve() for t in targets(page.read_text()) if "://" not in t]
    assert [page for page in PAGES if page not in reached] == []


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    text = (docs / "README.md").read_text(encoding="utf-8")
    items = re.findall(r"^\* \[[^]]+\]\((.+\.md)\)$", text, flags=re.MULTILINE)  # what docs/site/conf.py reads
    assert items == targets(text)
    listed = [(docs / item).resolve() for item in items]
    assert len(set(listed)) == len(listed)
    methods = docs / "methods" / "README.md"
    below = [methods.parent / target for target in targets(methods.read_text(encoding="utf-8"))]
    assert [page for page in PAGES if page not in (*listed, *below, docs / "README.md")] == []


@pytest.mark.slow
def test_the_commands_of_the_gallery_can_be_run() -> None:
    from typer.main import get_command

    from weightsmith._app.cli.app import make_app

    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    sections = load(ROOT / "examples" / "gallery.py").sections(text)
    assert len(sections) == text.count("\n## ")
    for name, lines in sections.items():
        assert f"gallery/{name}" in lines
        for line in lines.splitlines():
            program, command, *arguments = shlex.split(line, comments=True)
            known = get_command(make_app()).commands[command]  # type: ignore[attr-defined]
            options = {option for parameter in known.params for option in parameter.opts}
            assert program == "weightsmith"
            assert {argument for argument in arguments if argument.startswith("-")} <= options, line
            for argument in arguments:
                assert not argument.startswith("../../") or (ROOT / argument.removeprefix("../../")).exists(), line


def test_every_command_is_in_the_readme_or_a_page_and_every_one_there_exists() -> None:
    from typer.main import get_command

    from weightsmith._app.cli.app import make_app

    commands = set(get_command(make_app()).commands)  # type: ignore[attr-defined]
    assert commands == {name for page in PAGES for name in re.findall(r"\bweightsmith ([a-z]+(?:-[a-z]+)*)", code(page))}


def code(page: Path) -> str:
    """The code of a page, in blocks and in lines, comments left out."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(block.text for block in blocks_of(page) if block.language in ("console", "bash"))
    return re.sub(r"#.*", "", blocks) + "\n".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def test_the_pages_count_methods_and_formats_right() -> None:
    methods, formats = f"{len(all_methods())} merge methods", f"{len(FORMATS)} formats"
    for page in ("README.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text()
        assert f"[{methods}](" in text
        assert f"[{formats}](" in text
    assert f"the {methods}" in (ROOT / "docs" / "studio.md").read_text()


def test_make_targets_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z-]+)", code(page))}
    assert named >= {"demo", "test", "bench", "docs"}
    for name in named:
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), name


def test_the_blocks_for_measured_numbers_are_there_once() -> None:
    for page, name in ((ROOT / "README.md", "benchmark"), (ROOT / "docs" / "benchmarks.md", "results")):
        text = page.read_text()
        assert text.count(f"<!-- {name}:begin -->") == text.count(f"<!-- {name}:end -->") == 1
        assert text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")


def test_the_changelog_has_the_version() -> None:
    from weightsmith import __version__

    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


# ---- made from the code


def docs_script() -> ModuleType:
    return load(ROOT / "scripts" / "docs.py")


@pytest.mark.slow
def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs.py", "--check"], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the pages with generated blocks, in the place of docs/."""
    script = docs_script()
    for name in script.WITH_BLOCKS:
        shutil.copy(ROOT / "docs" / name, tmp_path / name)
    monkeypatch.setattr(script, "DOCS", tmp_path)
    return tmp_path


def edit(page: Path, old: str, new: str) -> None:
    text = page.read_text()
    assert text.count(old) == 1
    page.write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_generated_page_that_was_edited_missing_or_left_over_is_found(pages: Path) -> None:
    script = docs_script()
    texts = script.pages()
    assert {what for _, what in script.stale(texts)} == {"is missing"}
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert list(script.stale(texts)) == []
    edit(pages / "moe-layouts.md", "## Names on disk", "## Names")
    edit(pages / "recipe.md", "in one YAML file", "in a YAML file")
    edit(pages / "recipe.md", "<!-- keys of path:end -->", "| `more` | text | | More. |\n<!-- keys of path:end -->")
    (pages / "methods" / "gone.md").write_text("")
    assert [(path.name, what) for path, what in script.stale(script.pages())] == [
        ("moe-layouts.md", "is out of date"),
        ("recipe.md", "is out of date"),
        ("gone.md", "describes no method"),
    ]
    text = script.pages()[pages / "recipe.md"]
    assert "in a YAML file" in text, "what is written by hand stays"
    assert "`more`" not in text


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("<!-- dtypes:begin -->", "", "dtypes"),
        ("<!-- keys of path:begin -->", "<!-- keys of expert:begin -->\n<!-- keys of expert:end -->\n\\g<0>", "keys of expert"),
        ("<!-- keys of path:begin -->", "<!-- keys of module:begin -->\n<!-- keys of module:end -->\n\\g<0>", "keys of module"),
        ("<!-- keys of path:begin -->", "<!-- what:begin -->\n<!-- what:end -->\n\\g<0>", "what"),
    ],
)
def test_a_block_that_no_page_has_or_two_have_or_nothing_makes_is_an_error(pages: Path, old: str, new: str, name: str) -> None:
    edit(pages / "recipe.md", old, new.replace("\\g<0>", old))
    with pytest.raises(SystemExit, match=f"once: {name}$"):
        docs_script().pages()


def test_every_key_of_every_recipe_is_in_a_table_of_the_reference() -> None:
    from weightsmith._planning.recipe.grammar import LEVELS, MOE_LEVELS

    text = "".join((ROOT / "docs" / name).read_text() for name in docs_script().WITH_BLOCKS)
    for level in (*LEVELS, *MOE_LEVELS):
        rows = text.partition(f"<!-- keys of {level.name}:begin -->")[2].partition(":end -->")[0].splitlines()
        assert [row.split("`")[1] for row in rows if row.startswith("| `")] == list(level.names)
        assert all(row.count("|") == 5 and "|  |  |  |" not in row and "| |" not in row for row in rows[1:-1])


# ---- the architecture page


SOURCES = sorted((ROOT / "src" / "weightsmith").rglob("*.py"))


def first_column(page: str, heading: str) -> list[str]:
    """The first column of the first table under a heading of a page, without backquotes."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]
    table = next(part for part in section.split("\n\n") if part.lstrip().startswith("|"))
    return re.findall(r"^\| `?(\w[\w-]*)`? \|", table, flags=re.MULTILINE)[1:]


@cache
def statements(file: Path) -> list[ast.AST]:
    """The statements of a file, wherever in it."""
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.stmt)]


def imports(file: Path, *, types: bool = True) -> Iterator[str]:
    """The modules that a file imports, wherever in it. types: those that it imports for types alone too."""
    skipped = set()
    for node in () if types else statements(file):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in statements(file):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "weightsmith":
            yield from (f"weightsmith.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


PACKAGES = first_column("architecture.md", "The packages")


def package_of(file: Path) -> str:
    """The package at the top that a source file is in; "" for `weightsmith/__init__.py` and its like."""
    parts = file.relative_to(ROOT / "src" / "weightsmith").parts
    return parts[0] if len(parts) > 1 else ""


def arrows() -> dict[str, set[str]]:
    """The packages that each package imports, wherever in a file."""
    uses: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for file in SOURCES:
        for module in imports(file):
            if (owner := package_of(file)) and module.startswith("weightsmith.") and module != "weightsmith._version":
                name = module.split(".")[1]
                assert name in PACKAGES or owner == "_app", f"{file} uses {module}, a public name"
                uses[owner] |= {name} & {*PACKAGES} - {"plugin"}  # which names parts of the others
    return {package: others - {package} for package, others in uses.items()}


def test_the_packages_are_those_of_the_table() -> None:
    assert {package_of(file) for file in SOURCES} - {""} == set(PACKAGES)
    assert len([package for package in PACKAGES if package.startswith("_")]) <= 14


@pytest.mark.slow
def test_each_package_imports_only_packages_above_it() -> None:
    for package, others in arrows().items():
        below = [other for other in others if PACKAGES.index(other) >= PACKAGES.index(package)]
        assert not below, f"{package} imports {below}"


@pytest.mark.slow
def test_packages_stand_on_few_levels() -> None:
    levels: dict[str, int] = {}
    uses = arrows()
    for package in PACKAGES:
        levels[package] = 1 + max((levels[other] for other in uses[package]), default=0)
    assert max(levels.values()) <= 12, levels


def test_each_package_says_what_it_is_for() -> None:
    for package in PACKAGES:
        text = ast.get_docstring(ast.parse((ROOT / "src" / "weightsmith" / package / "__init__.py").read_text("utf-8")))
        assert text is not None, package
        assert len(text) > 80, package


@pytest.mark.slow
def test_the_dependencies_in_the_docs_are_those_that_the_code_imports() -> None:
    used = {module.partition(".")[0] for file in SOURCES for module in imports(file, types=False)}
    used -= set(sys.stdlib_module_names) | {"weightsmith", "hypothesis"}  # which `weightsmith.testing` needs alone
    documented = first_column("decisions.md", "Dependencies")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        re.split(r"[<>=]", line)[0]
        for name in ("torch", "lora", "moe", "calibration", "gguf", "studio", "remote", "gcs", "azure", "tune")
        for line in project["optional-dependencies"][name]
    }
    modules = {
        "PyYAML": "yaml",
        "google-re2": "re2",
        "google-auth": "google",
        "requests": "google",  # which google-auth asks with
        "azure-identity": "azure",
    }
    assert used == {modules.get(name, name) for name in (*documented, *extras)}
    declared = project["dependencies"]
    assert set(documented) <= {re.split(r"[<>=]", requirement)[0] for requirement in declared}


def test_no_module_imports_itself_by_way_of_others() -> None:
    names = {".".join(f.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): f for f in SOURCES}
    graph = {}
    for name, file in names.items():
        imported = set()
        for node in statements(file):
            if isinstance(node, ast.ImportFrom) and node.module:  # of a package, the modules that are taken from it
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= inner & names.keys() or {node.module}
        # The package itself names its public functions, and loads them when they are first used.
        graph[name] = (imported & names.keys()) - {name, "weightsmith"}
    # A circle has no module that imports none of the others, and none that no other imports.
    while leaves := {name for name, imports in graph.items() if not imports & graph.keys()}:
        graph = {name: imports for name, imports in graph.items() if name not in leaves}
    while outer := graph.keys() - {m for imports in graph.values() for m in imports}:
        graph = {name: imports for name, imports in graph.items() if name not in outer}
    assert not graph, {name: sorted(imports & graph.keys()) for name, imports in graph.items()}
