"""Sources of tensors. One interface, `abc.tensors.Tensors`; one file for each kind; composition, no inheritance.

files.py    tensors stored as plain bytes in files
adapted.py  a source with a LoRA adapter applied
composed.py a folder and its subfolders, as one; parts of the tensors of a source, or some of its tensors, under names of
            their own; state dicts. `_files/arrays.py` streams the bytes of a tensor in memory

A new file format is part of a stored format (`abc.stored.StoredFormat`): safetensors' and PyTorch's are in `formats/plain.py`.
Test a source with a subclass of `weightsmith.testing.SourceTests`.
"""
