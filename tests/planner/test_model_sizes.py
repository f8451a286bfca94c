"""How large a prepared model is, told by a rank that may have only a part of it."""

from pathlib import Path

from tests.support.torch_ranks import run_ranks
from tests.switch.test_rank import TRAINING

SIZES = """
    from nbdist.planner.rank.model_sizes import sizes
    counts_under = {}
    registry.set_choice(pick("fsdp1"))  # which a live model cannot be switched from
    flat = live.prepare_model(Net())
    counts_under["fsdp1"] = [counts for _, *counts in sizes()]
    again = [flat]; again.append(again)  # a circle, which no variable holds afterwards
    del flat, again; gc.unfreeze()
    begin("ddp")
    for name in ("fsdp", "tp", "pp"):
        switch.switch(pick(name))
        counts_under[name] = [counts for _, *counts in sizes()]
    count = sum(p.numel() for p in reference.parameters())
    n_bytes = sum(p.numel() * p.element_size() for p in reference.parameters())
    done(told=counts_under, own=[count, n_bytes])
"""


def test_sizes_are_the_whole_models_under_each_strategy(tmp_path: Path) -> None:
    """Parameters and bytes as one process counts them; the tied head and embedding once."""
    results = run_ranks(tmp_path, 2, TRAINING + SIZES)

    for result in results:
        assert {tuple(counts) for [counts] in result["told"].values()} == {tuple(result["own"])}
