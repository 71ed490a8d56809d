"""LoRA adapters as outputs. `weightsmith._models.lora` reads them as inputs.

select.py   which modules become factors, which are saved whole
built.py    the model as PEFT sees it, and which of its matrices are matrices of experts
factors.py  the product with the factors of a layer's matrices
changes.py  the product that compares all other tensors
ranks.py    ranks, by what of a difference is signal
placing.py  names in PEFT's model, and adapter_config.json
report.py   what an adapter keeps
extract.py  `weightsmith extract-lora`: the plans
cores.py    the product with the core matrices of a layer's adapters
merged_factors.py   the product that decomposes what a merge makes of them
combinations.py     the product with what PEFT's add_weighted_adapter makes of them
opening.py  the adapters of a merge, as the planner sees them: what they have factors of, and save whole
single_files.py     merges of adapters in single files: kohya's, diffusers'
merge.py    merges of adapters: the plan
"""
