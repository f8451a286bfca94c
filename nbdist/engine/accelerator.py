"""The ranks' `accelerator`, made when it is first used."""

from __future__ import annotations

from typing import Any

import accelerate


class LazyAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # untyped
    """An Accelerator without options that sets itself up at the first use.

    Accelerate keeps one state per process. One that is set up at the start would refuse
    the user's own `Accelerator(mixed_precision="bf16")`, the usual first line of a script.
    """

    def __init__(self) -> None:
        # Not super().__init__(): see __getattr__.
        self.__dict__["is_set_up"] = False

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that are not there: before the set-up, all that it makes."""
        if self.__dict__.get("is_set_up", True):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__["is_set_up"] = True
        try:
            super().__init__()
        except BaseException:  # the next use tries again, and shows the reason again
            self.__dict__.clear()
            self.__dict__["is_set_up"] = False
            raise
        return getattr(self, name)
