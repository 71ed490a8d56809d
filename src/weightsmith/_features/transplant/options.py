"""The options of `transplant_tokenizer`."""

from __future__ import annotations

from dataclasses import dataclass

from weightsmith._base.options import option, option_record

APPROXIMATIONS = ("omp", "hybrid", "common_interpolation", "subword", "landmark_pca", "mp_rope", "mean")
TABLES = ("no", "yes", "embed", "lm_head")
"""The tables of token rows in which a token of another text may serve: none, both, or one of them."""


@option_record("transplant_tokenizer", group="Token rows")
@dataclass(frozen=True, slots=True, kw_only=True)
class TransplantSettings:
    """How `transplant_tokenizer` makes the rows of tokens that the model lacks."""

    approximation: str = option(
        "omp",
        "-a, --approximation, --approximation-method NAME",
        "Approximation of missing tokens",
        choices=APPROXIMATIONS,
        plugins="weightsmith.approximations",
        replaced={
            "zero": "use mean",
            "randn": "use mean, with --new-vocab-noise for random rows",
            "john_hewitt": "use mean, with --new-vocab-noise for random rows",
            "stb": "use landmark_pca or omp",
        },
    )
    k: int = option(64, "-k, --k K", "Number of shared tokens that approximate a missing one", least=1)
    weight_scheme: str = option(
        "distance_proportional",
        "-w, --weight-scheme SCHEME",
        "common_interpolation only: weights of the neighbours",
        choices=("distance_proportional", "barycentric", "least_squares"),
        brief=(),
    )
    cosine_similarity: bool = option(
        False,
        "-c/-nc, --cosine-similarity/--no-cosine-similarity",
        "common_interpolation only: choose neighbours by angle, not by distance",
        brief=(),
    )
    subword_method: str = option(
        "mean",
        "-s, --subword-method METHOD",
        "subword and hybrid only: combination of the pieces",
        choices=("mean", "sum", "weighted_mean", "first_last"),
        brief=(),
    )
    prefix_match: str = option(
        "no",
        "-pm, --prefix-match TABLE",
        "Use the row of a missing token's longest known prefix",
        details="TABLE is where: both tables (yes), or one of them.",
        choices=TABLES,
        brief=(),
    )
    byte_match: str = option(
        "yes",
        "-bm, --byte-match TABLE",
        "Use the row of <0x41> for A, and the reverse",
        details="TABLE is where: both tables (yes), or one of them.",
        choices=TABLES,
        brief=(),
    )
    magikarp: bool = option(
        False, "--magikarp", "Approximate poorly trained tokens too", details="They are not used for others.", brief=()
    )
    match_norms: bool = option(
        False,
        "--match-norms",
        "Scale new rows to the norm predicted from shared tokens",
        brief=(),
    )
    new_vocab_noise: float | None = option(
        None,
        "-nvn, --new-vocab-noise S",
        "Standard deviation of noise added to new rows",
        unset="no noise",
        least=0,
        brief=(),
    )
    new_vocab_scale: float | None = option(
        None,
        "-nvs, --new-vocab-scale F",
        "Factor of new rows",
        unset="1",
        brief=(),
    )
    seed: int = option(0, "--seed N", "Seed of random rows and noise")
    max_shard_bytes: int | None = option(
        None, "--max-shard-size SIZE", "Maximum size of a weight file", unset="5GB", least=1, group="Output"
    )
    report_text: str | None = option(
        None, "--report-text FILE", "Text in which the report counts the missing tokens", path=True, group="Output"
    )
