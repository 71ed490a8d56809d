"""A recipe and the headers of models become a Plan. Reads no tensor data; imports everything above `_features`.

`recipe/` is what the user wrote: YAML with positions, the grammar as tables. `planner/` opens the models, matches their tensors
and assembles a draft, in these three steps; it also reopens a plan from its JSON and checks it against its inputs.
"""
