"""torch's tensors on their way: each type and form comes back the same, in memory of its own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from nbdist.errors import TransferError
from nbdist.variables import pack, unpack
from nbdist.variables import rank as variables_rank

_DTYPES = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.float32, torch.float64, torch.bfloat16,
    torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
_FORMS = {
    "plain": lambda: torch.arange(12.0).reshape(3, 4),
    "0-dim": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "strided": lambda: torch.arange(40.0)[3::7],
    "expanded": lambda: torch.tensor([1.0, 2.0])[:, None].expand(2, 5),
    "channels last": lambda: torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(
        memory_format=torch.channels_last
    ),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
}  # fmt: skip


def bits(dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of a byte, or of two where elements have two, as elements of the type."""
    patterns = torch.arange(256, dtype=torch.uint8)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return (patterns % 2 if dtype is torch.bool else patterns).view(dtype)


def there_and_back(value: object, torch_module: Any = torch) -> Any:
    parcel = pack.send(pack.pack({"x": value}, torch), [])
    return unpack.unpack(pickle.loads(pickle.dumps(parcel)), torch_module)["x"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_each_type_keeps_its_bits(dtype: torch.dtype) -> None:
    """NaNs and infinities with all others."""
    value = bits(dtype)
    copy = there_and_back(value)

    assert (copy.dtype, copy.shape) == (value.dtype, value.shape)
    assert torch.equal(copy.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("form", _FORMS)
def test_each_form_keeps_its_values(form: str) -> None:
    """The copy is contiguous, and nobody else's; without torch it is an array of the same."""
    value = _FORMS[form]()
    original = value.clone()
    copy, array = there_and_back(value), there_and_back(value, None)
    same = torch.equal(copy, value)
    copy.add_(1)

    assert same
    assert copy.shape == value.shape
    assert array.shape == tuple(value.shape)
    assert torch.equal(value, original)
    np.testing.assert_array_equal(array, value.resolve_conj().resolve_neg().numpy())


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_without_torch_each_type_becomes_an_array_of_the_same_values(dtype: torch.dtype) -> None:
    """Types that numpy lacks become float32, exactly; torch's own conversion is the judge."""
    value = bits(dtype)
    if dtype is torch.complex32:
        with pytest.raises(TransferError, match=r"no type for torch\.complex32"):
            there_and_back(value, None)
        return
    array = there_and_back(value, None)
    lacks = str(dtype).removeprefix("torch.") in unpack.AS_FLOAT32
    expected = value.float().numpy() if lacks else value.numpy()

    assert isinstance(array, np.ndarray)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)
    if lacks:
        zero = expected == 0
        np.testing.assert_array_equal(np.signbit(array[zero]), np.signbit(expected[zero]))
    assert array.flags.writeable
    assert there_and_back(value[0], None).shape == ()


def test_leaves_and_parameters_stay_what_they_are() -> None:
    """A result loses its graph, which cannot be sent."""
    leaf = torch.ones(2, requires_grad=True)
    values = there_and_back(
        {"leaf": leaf, "loss": (leaf * 2).sum(), "parameter": torch.nn.Parameter(torch.ones(2)),
         "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    )  # fmt: skip

    assert {name: tensor.requires_grad for name, tensor in values.items()} == {
        "leaf": True, "loss": False, "parameter": True, "frozen": False,
    }  # fmt: skip
    is_parameter = [isinstance(tensor, torch.nn.Parameter) for tensor in values.values()]
    assert is_parameter == [False, False, True, True]
    assert values["loss"].item() == 4.0


def test_tensors_are_found_in_whatever_holds_them() -> None:
    """Containers, modules and optimizers' states; tied parameters stay one."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    value = there_and_back({"a": [(model, torch.Size([1, 2]), torch.float16)]})["a"][0]

    assert value[0][1].weight is value[0][0].weight
    assert torch.equal(value[0][0].weight, model[0].weight)
    assert value[1:] == (torch.Size([1, 2]), torch.float16)


def test_without_torch_a_size_is_a_tuple_and_a_module_is_refused() -> None:
    """The kernel loads torch for nobody."""

    def opened(value: object) -> Any:
        parcel = pack.send(pack.pack({"x": value}, torch), [])
        return unpack.unpack(parcel, None, refused={"torch": "`import torch`"})["x"]

    assert opened(torch.Size([1, 2])) == (1, 2)
    with pytest.raises(
        TransferError, match=r"it contains torch\.nn\.modules\.linear\.Linear: `import"
    ):
        opened(torch.nn.Linear(1, 1))


def test_only_the_part_of_a_storage_that_is_seen_is_sent() -> None:
    """A small view does not take the large tensor along; two views arrive as two tensors."""
    large = torch.zeros(1_000_000)
    packed = pack.pack({"x": [large[:2], large[:2]]}, torch)
    value = unpack.unpack(pack.send(packed, []), torch)["x"]
    value[0].add_(1)

    assert packed.size_bytes < 1000
    assert value[1].tolist() == [0, 0]


def test_a_copy_can_be_resized() -> None:
    """As FSDP does with the storage of parameters."""
    copy = there_and_back(torch.ones(4))
    copy.untyped_storage().resize_(0)

    assert copy.untyped_storage().size() == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "device meta has no elements"),
    ],
    ids=["sparse", "meta"],
)
def test_tensors_of_other_kinds_are_refused(value: torch.Tensor, expected: str) -> None:
    """The variable is named, and what to do."""
    with pytest.raises(TransferError, match=f"^x cannot be sent: .*{expected}"):
        pack.pack({"x": value}, torch)


@pytest.fixture
def user_ns() -> Iterator[dict[str, Any]]:
    shell = InteractiveShell.instance()
    shell.user_ns.update(loss=torch.ones(3), weights=[torch.zeros(400_000)])
    yield shell.user_ns
    InteractiveShell.clear_instance()


def test_a_push_is_bound_only_when_it_is_said(user_ns: dict[str, Any]) -> None:
    """Received, dropped and received again, the user's variable changes with `bind`."""

    def parcel(value: object) -> pack.PackedValue:
        return pack.send(pack.pack({"loss": value}, torch), [])

    variables_rank.receive("one", parcel(1))
    variables_rank.drop("one")
    variables_rank.receive("two", parcel(2))
    before = user_ns["loss"]
    variables_rank.bind("two", ["loss"])
    variables_rank.receive("three", parcel(3))
    variables_rank.bind("three", [])  # it only came along

    assert torch.equal(before, torch.ones(3))
    assert user_ns["loss"] == 2
