"""Values are taken apart, sent by themselves or through a file, and made anew; without torch."""

import pickle
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbdist.errors import TransferError
from nbdist.variables import pack, unpack
from nbdist.variables.pack import PackedValue, TensorRecord

_ARRAYS = {
    "plain": np.arange(12.0).reshape(3, 4),
    "large": np.arange(200_000.0),
    "of Fortran's order": np.asfortranarray(np.arange(2000.0).reshape(40, 50)),
    "not contiguous": np.arange(40_000.0).reshape(200, 200)[::3, 1::2],
    "empty": np.empty((0, 5), np.int16),
    "without dims": np.array(7.5),
    "of objects": np.array([{"a": 1}, None], object),
    "of records": np.zeros(900, [("x", "f8"), ("y", "i4")]),
    "of texts": np.array(["a", "bcd"]),
    "complex": np.array([1 + 2j]),
}


@dataclass
class Point:
    """Something of a class."""

    x: int


class Raising:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 / 0",)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two places for files, each in one of its own."""
    folders = [tmp_path / "first" / "run", tmp_path / "second" / "run"]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def sent(value: object, folders: list[Path] | None = None) -> PackedValue:
    """The parcel of a value, as it arrives after the wire."""
    parcel: PackedValue = pickle.loads(
        pickle.dumps(pack.send(pack.pack({"x": value}), folders or []))
    )
    return parcel


def there_and_back(value: object, folders: list[Path] | None = None) -> Any:
    return unpack.unpack(sent(value, folders))["x"]


def files(folders: list[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir()]


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", [1, (2, {3})], {"a": Point(1)}])
def test_objects_come_back_equal(value: object) -> None:
    """Plain objects and objects of classes."""
    assert there_and_back(value) == value


@pytest.mark.parametrize("kind", _ARRAYS)
@pytest.mark.parametrize("through", ["the call", "a file"])
def test_arrays_come_back_equal_and_their_own(
    kind: str, through: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, type and shape; what is written into the copy changes nothing."""
    monkeypatch.setattr(pack, "LARGE_BYTES", 0)
    array = _ARRAYS[kind].copy() if kind != "not contiguous" else _ARRAYS[kind]
    copy = there_and_back(array, folders if through == "a file" else None)
    before = copy.tobytes() if array.dtype != object else None

    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(copy, array)
    if before is not None and array.size and not array.dtype.names and array.dtype.kind != "U":
        copy += 1
        np.testing.assert_array_equal(copy, array + 1)
    assert not np.shares_memory(copy, array)


def test_an_array_that_cannot_be_written_stays_so() -> None:
    """Large or small."""
    for count in (3, 100_000):
        array = np.zeros(count)
        array.flags.writeable = False

        assert not there_and_back(array).flags.writeable


def test_the_same_object_twice_stays_one() -> None:
    """Within a value, and between variables that are sent together."""
    array = np.zeros(5000)
    packed = pack.pack({"a": [array, array], "b": array})
    values = unpack.unpack(pack.send(packed, []))

    assert values["a"][0] is values["a"][1] is values["b"]


def test_a_large_value_goes_through_a_file_of_its_owner(folders: list[Path]) -> None:
    """From a million bytes on, in the first folder, with nothing of it in the call."""
    small = sent(np.zeros(pack.LARGE_BYTES - 1000, np.uint8), folders)
    large = sent(np.zeros(pack.LARGE_BYTES, np.uint8), folders)
    [path] = files(folders)

    assert (small.path, large.path, large.data) == ("", str(path), b"")
    assert path.parent == folders[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == sum(large.sizes)


def test_without_room_it_goes_through_the_next_folder_and_says_so(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remark has both numbers; what was written is read as ever."""
    free = {folders[0]: 10_000_000, folders[1]: 10**12}
    monkeypatch.setattr(
        pack.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder])
    )
    array = np.arange(500_000)
    parcel = sent(array, folders)

    assert Path(parcel.path).parent == folders[1]
    assert " ".join(parcel.remarks) == (
        f"it was sent through a file on disk: 4.0 MB needed, 10.0 MB free in {folders[0].parent}"
    )
    np.testing.assert_array_equal(unpack.unpack(parcel)["x"], array)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), r"space to send 4\.0 MB.*first.*No space.*second"),
        (KeyboardInterrupt("pressed"), "pressed"),
    ],
)
def test_a_file_that_cannot_be_written_to_its_end_is_removed(
    error: BaseException, message: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is an error that names both places."""

    def fail(_descriptor: int, _data: memoryview) -> int:
        raise error

    monkeypatch.setattr(pack.os, "write", fail)

    with pytest.raises((TransferError, KeyboardInterrupt), match=message):
        sent(np.arange(500_000), folders)
    assert files(folders) == []


def test_what_cannot_be_pickled_is_named() -> None:
    """The variable, of several the one that it is, and the reason."""
    with pytest.raises(TransferError, match=r"^bad cannot be sent: .*generator"):
        pack.pack({"good": 1, "bad": (n for n in [1]), "fine": 2})
    with pytest.raises(TransferError, match=r"^lock cannot be sent: TypeError: .*lock"):
        pack.pack({"lock": threading.Lock()})
    with pytest.raises(TransferError, match=r"^good, bad cannot be sent: "):
        pack.pack({"good": 1, "bad": threading.Lock()}, finds_culprit=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Raising(), "cannot be unpacked: ZeroDivisionError: division by zero"),
        (Fraction(1, 2), r"it contains fractions\.Fraction: `import fractions` in"),
    ],
)
def test_what_cannot_be_made_anew_is_told(value: object, message: str) -> None:
    """With the class and text of its exception; a package that must not be loaded is named."""
    with pytest.raises(TransferError, match=message):
        unpack.unpack(sent(value), refused={"fractions": "`import fractions` in"})


@pytest.fixture
def only_here() -> Iterator[type]:
    """A class that the main module had when it was pickled."""
    main = sys.modules["__main__"]
    only_here = type("OnlyHere", (), {"__module__": "__main__"})
    main.OnlyHere = only_here  # type: ignore[attr-defined]
    yield only_here
    if hasattr(main, "OnlyHere"):
        del main.OnlyHere


def test_a_class_of_a_cell_is_sent_by_name(only_here: type) -> None:
    """It is found where a cell has defined it too, and asked for where not."""
    parcel = sent(only_here())
    array = unpack.unpack(parcel)["x"]
    del sys.modules["__main__"].OnlyHere  # type: ignore[attr-defined]

    assert type(array) is only_here
    with pytest.raises(
        TransferError, match="OnlyHere is defined in a notebook cell and cannot be sent; run"
    ):
        unpack.unpack(parcel)


def test_a_file_that_is_cut_off_or_not_seen_is_told(folders: list[Path]) -> None:
    """Not seen as on another host."""
    parcel = sent(np.arange(500_000), folders)
    with pytest.raises(TransferError, match="FileNotFoundError"):
        unpack.unpack(replace(parcel, path="/nowhere/at/all"))
    path = Path(parcel.path)
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(TransferError, match="10 bytes are missing"):
        unpack.unpack(parcel)


def test_a_type_that_numpy_cannot_even_hold_asks_for_torch() -> None:
    """Nothing is guessed."""
    record = TensorRecord("float4_e2m1fn_x2", (1,))
    packed = pack.pack({"x": 1})
    parcel = replace(
        pack.send(packed, []),
        sizes=(packed.pieces[0].nbytes, 1),
        tensors=(record,),
        data=bytes(packed.pieces[0]) + b"\0",
    )

    with pytest.raises(TransferError, match=r"no type for torch\.float4_e2m1fn_x2: `import torch`"):
        unpack.unpack(parcel)


def test_a_number_outside_its_pickle_is_refused() -> None:
    """`tensor_at` is a name, not a function to call."""
    with pytest.raises(TransferError, match="tensor 3"):
        pack.tensor_at(3)


def test_messages_have_no_addresses() -> None:
    """The same failure reads the same on each rank."""
    main = sys.modules["__main__"]
    nameless = eval("lambda: 1", vars(main))

    with pytest.raises(TransferError, match=r"^f cannot be sent: .*<lambda> at 0x\.\.\.>"):
        pack.pack({"f": nameless})
