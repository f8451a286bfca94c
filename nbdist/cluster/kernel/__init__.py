"""Starting and ending ranks through ipyparallel, and the guardian that outlives the kernel.

Cells do not stand here, and no diagnosis of a wait.
"""
