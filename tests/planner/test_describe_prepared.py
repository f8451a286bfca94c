"""How large a prepared model is, told by a rank that may have only a part of it."""

import gc

from nbdist.parallel.accelerator import prepare as live
from nbdist.parallel.live import registry
from nbdist.planner.rank.describe_prepared import sizes
from nbdist.switch.rank import switch
from tests.programs.rank import user
from tests.programs.switching import Net, begin, fresh, pick
from tests.support.torch_ranks import on_ranks


def flat_model_in_a_circle() -> list[list[int]]:
    """Under fsdp1, which a live model cannot be switched from; no variable holds it afterwards."""
    registry.set_choice(pick("fsdp1"))
    flat = live.prepare_model(Net())
    again = [flat]
    again.append(again)
    return [list(counts) for _, *counts in sizes()]


@on_ranks(2)
def test_sizes_are_the_whole_models_under_each_strategy() -> None:
    """Parameters and bytes as one process counts them; the tied head and embedding once."""
    fresh()
    whole = [*user.reference.parameters()]
    n_bytes = sum(p.numel() * p.element_size() for p in whole)
    expected = [[sum(p.numel() for p in whole), n_bytes]]
    assert flat_model_in_a_circle() == expected
    gc.unfreeze()
    begin("ddp")
    for name in ("fsdp", "tp", "pp"):
        switch.switch(pick(name))
        assert [counts for _, *counts in sizes()] == expected, name
