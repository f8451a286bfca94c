"""Watching torch's calls: what is left of it, and what a mistake of ours does to a step."""

import copy
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbdist.lints.rank import data, ddp, initial_values, optimizer_steps, watch


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    watch.install()
    watch.begin()
    yield
    watch.uninstall()


def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    (parameter * 2).mean().backward()
    optimizer.step()


def stepper() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(2))
    return parameter, torch.optim.SGD([parameter], 0.1)


def test_uninstall_leaves_torch_as_it_was() -> None:
    """Every function that was replaced is torch's own again; twice is harmless."""
    watched = [torch.Tensor.backward, torch.amp.GradScaler.scale, torch.amp.autocast.__enter__]
    watch.uninstall()
    watch.uninstall()
    originals = [torch.Tensor.backward, torch.amp.GradScaler.scale, torch.amp.autocast.__enter__]

    assert not set(map(id, watched)) & set(map(id, originals))
    assert all(function.__module__.startswith("torch") for function in originals)
    assert not hasattr(originals[0], "__wrapped__")


def test_a_mistake_of_ours_does_not_fail_the_users_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, the loop goes on with all its batches, and other objects are looked at."""
    odd, even = (DataLoader(TensorDataset(torch.full((8, 2), i)), batch_size=2) for i in (1.0, 2.0))
    digested, digest = [], data.digest

    def broken_at_odd(batch: list[torch.Tensor]) -> str:
        digested.append(int(batch[0][0, 0]))
        if digested[-1] == 1:
            raise ValueError("no digest")
        return digest(batch)

    monkeypatch.setattr(data, "digest", broken_at_odd)
    parameter, optimizer = stepper()
    before = optimizer_steps.count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [len(x) for loader in (odd, odd, even) for (x,) in loader]
        step(parameter, optimizer)

    assert batches == [2] * 12
    assert digested == [1, 2, 2, 2, 2]
    (warning,) = caught
    assert "same-data (ValueError('no digest'))" in str(warning.message)
    assert optimizer_steps.count() == before + 1
    assert float(parameter.detach()[0]) == pytest.approx(0.9)


def test_what_one_part_cannot_say_at_the_end_of_a_cell_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the others have noted is sent."""

    def broken() -> None:
        raise ValueError("no end")

    monkeypatch.setattr(data, "end", broken)
    watch.note("bf16-scaler", "GradScaler")
    with pytest.warns(UserWarning, match="data of this cell could not be evaluated"):
        observations = watch.collect()

    assert [seen.lint for seen in observations] == ["bf16-scaler"]


def test_errors_of_a_loader_and_a_backward_are_the_users_own() -> None:
    """As raised, and counted as nothing else."""

    class Bad(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise KeyError(index)

    with pytest.raises(KeyError):
        next(iter(DataLoader(Bad())))
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()


def test_a_digest_sees_the_first_numbers_of_what_a_loader_may_give() -> None:
    """Tensors, arrays, texts, in lists and dicts; the same again is the same."""
    batch = {"x": torch.arange(4), "y": ["a", 1.5], "z": (torch.ones(2, dtype=torch.bfloat16),)}
    other = copy.deepcopy(batch)

    assert data.digest(batch) == data.digest(other)
    other["x"][3] = 0  # type: ignore[index]
    assert data.digest(batch) != data.digest(other)
    assert data.digest(torch.zeros(2, 3)) != data.digest(torch.zeros(3, 2))


def test_values_are_compared_by_bits() -> None:
    """-0.0 is not 0.0; meta and empty tensors are left out."""
    zero = [torch.zeros(3, 4), torch.empty(0), torch.empty(2, device="meta")]

    assert initial_values.digest(zero) == initial_values.digest([torch.zeros(3, 4)])
    assert initial_values.digest(zero) != initial_values.digest([-torch.zeros(3, 4)])


def test_a_models_hook_is_pickled_as_nothing_of_nbdist() -> None:
    """A DDP model that is saved whole loads where there is no nbdist, and its hook does nothing."""
    hook = ddp.Ddp(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    text, after = pickle.dumps(hook), pickle.dumps(hook.reduction)
    arguments = (torch.ones(1),)

    assert b"nbdist" not in text + after
    assert pickle.loads(after)(torch.nn.Linear(1, 1), arguments, torch.ones(1)) is None
    assert pickle.loads(text)(torch.nn.Linear(1, 1), arguments) is arguments
    assert copy.deepcopy(hook)(torch.nn.Linear(1, 1), arguments) is arguments


@pytest.mark.filterwarnings("ignore")  # of torch's own, while it compiles
def test_a_compiled_step_is_left_alone() -> None:
    """torch.compile traces through torch's hooks; ours are not in its graph."""
    parameter, optimizer = stepper()
    parameter.grad = torch.ones(2)
    before = optimizer_steps.count()
    torch.compile(optimizer.step, backend="eager")()

    assert optimizer_steps.count() == before
    assert float(parameter.detach()[0]) == pytest.approx(0.9)
