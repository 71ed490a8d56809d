"""The grammar of recipes that make an existing mixture of experts smaller, as tables like `grammar.py`."""

from __future__ import annotations

from weightsmith.recipe.grammar import Key, Level

ROUTERS = ("first", "mean")
"""Which router row a merged expert gets; the first is used when none is named."""

PRUNE = Level(
    "prune_experts",
    "in 'prune_experts'",
    "Which experts stay. They are numbered anew, in this order.",
    (
        Key("keep", "experts", "The experts that stay, the same in every layer: `[0, 2, 5]`."),
        Key("keep_by_layer", "experts_by_layer", "Layer to the experts that stay there, as many in each layer."),
        Key("saliency", "text", "JSON file, layer to one number for each expert: those with the largest stay."),
        Key("experts", "count", "With `saliency`: how many stay in each layer."),
    ),
    one_of=("keep", "keep_by_layer", "saliency"),
)

MERGE = Level(
    "merge_experts",
    "in 'merge_experts'",
    "Which experts are averaged into one. Groups become the new experts, in this order.",
    (
        Key("groups", "groups", "The groups, the same in every layer: `[[0, 3], [1, 2]]`. Each expert is in one."),
        Key("groups_by_layer", "groups_by_layer", "Layer to its groups, as many in each layer."),
        Key("weights", "weights", "A weight for each expert of each of the `groups`; equal ones by default."),
        Key("weights_by_layer", "weights_by_layer", "The same for `groups_by_layer`."),
        Key("match", "flag", "Reorder the neurons of each expert to match the group's first; false by default."),
        Key(
            "router", "choice", "Router row of a merged expert: its group's `first` (default) or their `mean`.", choices=ROUTERS
        ),
    ),
    one_of=("groups", "groups_by_layer"),
)

SURGERY = Level(
    "surgery",
    "at the top level",
    "A smaller mixture of experts, made of one that is there.",
    (
        Key("model", "model", "The mixture of experts: `path_or_hub_id[@revision]`.", required=True),
        Key("prune_experts", "section", "Leave experts out.", of=PRUNE),
        Key("merge_experts", "section", "Average experts.", of=MERGE),
        Key("dtype", "dtype", "Dtype of the output; as stored by default."),
        Key("name", "text", "A label; without effect."),
    ),
    one_of=("prune_experts", "merge_experts"),
)

SURGERY_LEVELS = (SURGERY, PRUNE, MERGE)
"""Every kind of mapping of these recipes."""
