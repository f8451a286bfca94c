"""What ranks say of their models, as one record."""

from dataclasses import replace

import pytest

from nbdist.lints import replicas, view
from nbdist.lints.replicas import (
    BUFFER,
    GRADIENT,
    PARAMETER,
    Look,
    ModelLook,
    ReplicaCheck,
    UnreducedStep,
)

W = Look(PARAMETER, "up.weight", "all", 7, 12)


def compared(*looks: tuple[Look, ...], notes: tuple[str, ...] = ()) -> ReplicaCheck:
    return replicas.compare(
        {rank: [ModelLook("model", "ddp", tensors, notes)] for rank, tensors in enumerate(looks)}
    )


def test_equal_models_are_healthy() -> None:
    """And what was compared is counted."""
    result = compared((W, replace(W, name="down.weight", part="")), (W,))

    assert result.is_healthy
    assert result.models[0].tensors[PARAMETER] == 2
    assert result.models[0].compared[PARAMETER] == 1
    assert view.checkup(result).text.startswith("healthy: on 2 ranks everything is finite")


def test_a_difference_names_the_ranks_that_agree() -> None:
    """Of a tensor in one part; the other part is another rank's."""
    result = compared((W,), (replace(W, digest=8),), (W,), (replace(W, part="other", digest=9),))
    (difference,) = result.differences

    text = view.checkup(result.measured({difference: 0.25})).text
    assert (difference.groups, difference.count) == (((0, 2), (1,)), 12)
    assert not result.is_healthy
    assert "model: parameter up.weight differs between ranks 0,2 and rank 1, by up to 0.25" in text
    assert view.checkup(result).is_bad


def test_a_step_with_gradients_apart_is_told_where_they_differed() -> None:
    """Ranks can have reduced them in another way."""
    at = UnreducedStep("two forwards", "line 7 of cell [12]", "a")
    same, apart = (
        replicas.compare(
            {
                rank: [ModelLook("model", "zero1", (W,), unreduced=replace(at, digest=digest))]
                for rank, digest in enumerate(digests)
            }
        )
        for digests in ("aa", "ab")
    )
    text = view.checkup(apart).text

    assert same.is_healthy
    assert not apart.is_healthy
    assert text.startswith("NOT healthy on 2 ranks: gradients were not reduced")
    assert "the optimizer of model stepped at line 7 of cell [12] with gradients" in text


def test_buffers_may_differ() -> None:
    """Running means do between two forwards; it is told, and no fault."""
    result = compared((replace(W, kind=BUFFER),), (replace(W, kind=BUFFER, digest=8),))

    assert result.is_healthy
    assert "DDP sends rank 0's in the next forward" in view.checkup(result).text


@pytest.mark.parametrize(("kind", "first"), [(PARAMETER, "a.w"), (GRADIENT, "c.w")])
def test_where_nan_is_met_first(kind: str, first: str) -> None:
    """Forward from the beginning, backward from the end; the order is the model's."""
    looks = tuple(
        replace(W, kind=kind, name=name, n_nan=n, n_inf=n // 2)
        for name, n in (("a.w", 2), ("b.w", 0), ("c.w", 4))
    )
    (bad,) = compared(looks, looks).not_finite

    assert (bad.first, bad.module) == (first, first.partition(".")[0])
    assert (bad.names, bad.n_nan, bad.n_inf, bad.ranks) == (("a.w", "c.w"), 12, 6, (0, 1))


def test_only_a_few_finite_differences_are_measured() -> None:
    """Of hundreds that differ the first say enough; NaN minus anything is NaN."""
    ours = tuple(replace(W, name=f"{n}.w", n_nan=int(n == 0)) for n in range(9))
    result = compared(ours, tuple(replace(look, digest=8) for look in ours))

    assert [difference.name for difference in result.to_measure] == ["1.w", "2.w", "3.w"]
    assert "4 more parameters differ" in view.checkup(result).text


def test_a_model_that_a_rank_lacks_is_told() -> None:
    """With its ranks; it is compared on the others."""
    looks = {0: [ModelLook("model", "DDP", (W,))], 1: [], 2: [ModelLook("model", "DDP", (W,))]}
    result = replicas.compare(looks)

    assert result.models[0].notes == ("[1] no model of this name",)
    assert result.is_healthy


def test_no_model_is_no_fault() -> None:
    """The view says that there are none."""
    assert view.checkup(replicas.compare({0: [], 1: []})).text == "there are no models on the ranks"
