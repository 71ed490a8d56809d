"""An output in a local folder.

Reading order: `disk` (system calls), `target` (what may be overwritten), `claim` (which staging folders are ours), `locks`,
`area` (the staging folder), `weights`, `other_files`, `products`, `backend` (unfinished work), `rename` (publication), `place`.
"""
