"""Names of variables that are pushed or pulled, and one line about each."""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from nbdist.core.failures import ranks_phrase
from nbdist.errors import OptionError

_CLOSE = 3


def check_names(names: Sequence[object], verb: str) -> None:
    """Refuse what is not the name of a variable; the verb, `%dist_push`, is for the message.

    Raises:
        OptionError: If one is none, or none is given.
    """
    if not names:
        raise OptionError(f"{verb}: name one variable or more. For example: {verb} loss")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise OptionError(
                f"{verb}: {name!r} is not a variable name. Assign the value to a variable first."
            )


def close_to(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """The known names that are like this one, the closest first."""
    public = [other for other in candidates if not other.startswith("_")]
    return tuple(difflib.get_close_matches(name, public, _CLOSE))


def check_known(names: Iterable[str], defined: Collection[str]) -> None:
    """Refuse names that the notebook does not have.

    Raises:
        OptionError: It lists close names.
    """
    for name in names:
        if name not in defined:
            raise OptionError(
                f"The notebook has no variable {name}; nothing was pushed."
                + _close(close_to(name, defined))
            )


def check_on_ranks(missing: Mapping[int, Mapping[str, Sequence[str]]]) -> None:
    """Refuse names that are missing on a rank.

    `missing` has for each rank that was asked: missing name -> close names that it has.

    Raises:
        OptionError: It says which ranks have the name; or which do not, and close names.
    """
    for name in dict.fromkeys(name for names in missing.values() for name in names):
        without = [rank for rank, names in missing.items() if name in names]
        having = [rank for rank in missing if rank not in without]
        if having:
            raise OptionError(
                f"{name} exists on {ranks_phrase(having)}, not on {ranks_phrase(without)}; nothing "
                f"was pulled. %dist_pull {name} --ranks {','.join(map(str, having))} pulls it from "
                "there."
            )
        close = dict.fromkeys(other for rank in without for other in missing[rank][name])
        where = f"any of {ranks_phrase(without)}" if len(without) > 1 else ranks_phrase(without)
        raise OptionError(f"{name} does not exist on {where}; nothing was pulled.{_close(close)}")


def describe(value: object) -> str:
    """The kind of a value, short: `tensor float32 (3,)`, `dict of 2`, `int`."""
    kind = type(value)
    if isinstance(value, np.ndarray) or is_tensor(value):
        word = "array" if isinstance(value, np.ndarray) else "tensor"
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        return f"{word} {dtype} {tuple(getattr(value, 'shape', ()))}"
    if isinstance(value, type):
        return "class"
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"{kind.__name__} of {len(value)}"
    return kind.__name__


def describe_list(values: Sequence[object]) -> str:
    """The kinds of several ranks' values: `list of 2 tensors float32 (3,)`."""
    kinds = [describe(value) for value in values]
    if any(kind != kinds[0] for kind in kinds):
        return f"list of {len(kinds)}: {'; '.join(kinds)}"
    word, _, rest = kinds[0].partition(" ")
    if word in {"array", "tensor"}:
        return f"list of {len(kinds)} {word}s {rest}"
    return f"list of {len(kinds)}, each {kinds[0]}"


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor; says so without torch."""
    return any(
        (base.__module__, base.__name__) == ("torch", "Tensor") for base in type(value).__mro__
    )


def _close(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return f" Similar names: {text}." if text else ""
