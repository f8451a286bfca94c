"""Parts of the user's `accelerator`: loaders, optimizers, schedulers, gathering, saving.

Only public methods of `accelerate.Accelerator` are overridden.
"""
