"""The ranks' `accelerator`, made when it is first used."""

from __future__ import annotations

from typing import Any

import accelerate


class LazyAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # untyped
    """An Accelerator without options that sets itself up at the first use, and is one from then on.

    Accelerate keeps one state per process. One that is set up at the start would refuse
    the user's own `Accelerator(mixed_precision="bf16")`, the usual first line of a script.
    """

    def __init__(self) -> None:
        """Nothing yet."""

    def __getattribute__(self, name: str) -> Any:
        """Any attribute is a use, methods too; what Python itself asks for, `__class__`, is none.

        Methods must not run before the set-up: `wait_for_everyone` would find no state, make one
        for a single process, and wait for nobody.
        """
        if name.startswith("__"):
            return super().__getattribute__(name)
        self.__class__ = accelerate.Accelerator
        try:
            accelerate.Accelerator.__init__(self)
        except BaseException:  # the next use tries again, and shows the reason again
            self.__dict__.clear()
            self.__class__ = LazyAccelerator
            raise
        return getattr(self, name)
