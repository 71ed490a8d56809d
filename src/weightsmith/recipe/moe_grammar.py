"""The grammar of `weightsmith moe` as tables, like `grammar.py`. mergekit-moe's keys mean the same here."""

from __future__ import annotations

from weightsmith.recipe.grammar import Key, Level

GATE_MODES = ("router_input", "hidden", "hidden_avg", "hidden_last", "cheap_embed", "random", "uniform_random")
"""How router weights are made; the first is used when none is named."""

EXPERT = Level(
    "expert",
    "in an entry of 'experts'",
    "One expert: a dense model whose MLP it gets, and the prompts it is for.",
    (
        Key("source_model", "source", "The model whose MLP becomes the expert, or a recipe of a merge.", required=True),
        Key("positive_prompts", "texts", "What the expert is for: its router weights come from these."),
        Key("negative_prompts", "texts", "What it is not for."),
        Key(
            "prompts_file",
            "text",
            "Text file of further positive prompts: one a paragraph, or cut by `prompt_tokens`. A relative path starts at the "
            "recipe's folder.",
        ),
        Key("held_out_file", "text", "Text file like it, for the routing report alone: nothing is made of it."),
        Key("noise_scale", "number", "Standard deviation of normal noise added to its weights.", minimum=0.0),
        Key("noise_fraction", "number", "Share of its weights, at random, that get noise; 1 by default.", minimum=0, maximum=1),
        Key(
            "drop_fraction",
            "number",
            "Drop-Upcycling: share of its neurons, at random, that are drawn anew from a normal distribution like theirs.",
            minimum=0.0,
            maximum=1.0,
        ),
        Key("residual_scale", "number", "Factor on its down projection, after the noise."),
        Key("copies", "count", "The entry stands for so many experts, each with noise of its own; 1 by default.", maximum=1024),
    ),
)

UPCYCLING = Level(
    "upcycling",
    "at the top level",
    "A mixture of experts made of dense models.",
    (
        Key(
            "base_model",
            "source",
            "Attention, norms, embeddings and tokenizer: a model, or a recipe of a merge.",
            required=True,
        ),
        Key("experts", "list", "The experts, in the order of the router's rows.", required=True, of=EXPERT),
        Key("shared_experts", "list", "Experts that every token goes through, where the architecture has them.", of=EXPERT),
        Key("architecture", "text", "Of the output; by default the first that can hold these models."),
        Key("gate_mode", "choice", "How router weights are made; router_input by default.", choices=GATE_MODES),
        Key("prompt_tokens", "count", "Cut the text files of prompts into rows of so many tokens, and not into paragraphs."),
        Key("router_scale", "number", "Factor on all router weights; 1 by default.", minimum=0.0),
        Key(
            "virtual_groups",
            "count",
            "Cut each MLP into so many experts, which the router chooses together; `experts_per_token` is a multiple of it.",
        ),
        Key("experts_per_token", "count", "Experts that each token is sent to; 2 by default, 1 of one."),
        Key("dtype", "dtype", "Dtype of the output; the base's by default."),
        Key("name", "text", "A label; without effect."),
    ),
)

MOE_LEVELS = (UPCYCLING, EXPERT)
"""Every kind of mapping that only `weightsmith moe` has."""
