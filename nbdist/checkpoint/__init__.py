"""Checkpoints as files: manifest, folders, chunks, other formats, what does not match.

Pure, with the kernel's calls in `kernel.py`; tensors are handled in `checkpoint.rank`.
"""
