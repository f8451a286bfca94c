"""What the user's `accelerator` is made of: loaders, optimizers, schedulers, gathering, saving.

Only public methods of `accelerate.Accelerator` are overridden.
"""
