"""A stand-in for the ranks' `accelerator` that costs no import before it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ACCELERATOR = "nbdist.parallel.accelerator.accelerator"
# What cells use sooner or later: together two or three seconds of imports.
MODULES = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "accelerate",
    ACCELERATOR,
    "torch._dynamo",  # for the first DDP
)


class AcceleratorProxy:
    """Becomes nbdist's lazy Accelerator as soon as anything is asked of it.

    Accelerate, and what torch needs for its strategies, take half a second to import.
    """

    def __init__(self) -> None:
        """Nothing is imported before the first use; what has been already counts from now on."""
        _stand_ins.append(self)
        if _loaded:
            become(_loaded[0])

    def __getattribute__(self, name: str) -> Any:
        """Any attribute is a use, but `__dict__`."""
        if name == "__dict__":  # what looks at objects without using them
            return super().__getattribute__(name)
        accelerator = _wake(self)
        # isinstance asks for it when the type has not answered; the type's own would tell nothing.
        return type(accelerator).__base__ if name == "__class__" else getattr(accelerator, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set the attribute on the Accelerator, which is imported for it."""
        setattr(_wake(self), name, value)

    def __dir__(self) -> list[str]:
        """Names are asked of the Accelerator."""
        return dir(_wake(self))

    def __repr__(self) -> str:
        """It is shown as the Accelerator."""
        return repr(_wake(self))


_stand_ins: list[AcceleratorProxy] = []
_loaded: list[type] = []


def become(cls: type) -> None:
    """Let all stand-ins, later ones too, be of the class that they stand for: it is loaded."""
    _loaded[:] = [cls]
    while _stand_ins:
        object.__setattr__(_stand_ins.pop(), "__class__", cls)


def _wake(stand_in: AcceleratorProxy) -> Any:
    """The same object as what it stands for."""
    import_module(ACCELERATOR)  # which calls `become`
    return stand_in
