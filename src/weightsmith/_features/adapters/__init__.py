"""LoRA adapters as outputs. `weightsmith._models.lora` reads them as inputs.

select.py   which modules become factors, which are saved whole; the product that compares all other tensors
built.py    the model as PEFT sees it, and which of its matrices are matrices of experts
factors.py  the product with the factors of a layer's matrices; their ranks, by what of a difference is signal
placing.py  names in PEFT's model, and adapter_config.json; single files: kohya's, diffusers'
convert.py  `weightsmith convert-lora`: adapters as other programs read them
renaming.py names of modules in single files, from one program's to another's
families.py  names of diffusion models' modules, in their first implementation and in diffusers: tables
report.py   what an adapter keeps
extract.py  `weightsmith extract-lora`: the plans
cores.py    the product with the core matrices of a layer's adapters; that which decomposes what a merge makes of them
combinations.py     the product with what PEFT's add_weighted_adapter makes of them
opening.py  the adapters of a merge, as the planner sees them: what they have factors of, and save whole
merge.py    merges of adapters: the plan
"""
