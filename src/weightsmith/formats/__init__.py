"""On-disk formats, one file each: bytes of unknown origin in, checked and frozen values out."""
