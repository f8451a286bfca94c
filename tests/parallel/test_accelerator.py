"""One cell of plain Accelerate code trains under every strategy as one process does."""

import json
from pathlib import Path

import pytest

from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL

pytestmark = pytest.mark.engine

ROWS = """
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    rows = json.loads(os.environ["ROWS"])
    outcomes = {}
    for k in (1, 2):
        expected = alone(k)
        accelerator.gradient_accumulation_steps = k
        for row in rows:
            name, options = row[0], row[1]
            use(name, **options)
            got = tried(cell, accelerator)
            difference = got if isinstance(got, str) else apart(got, expected)
            outcomes[f"{name} {options} {k}"] = difference
            if isinstance(got, str) and "SKIPROWS" not in os.environ:
                done(found=outcomes)
    gc.collect()
    done(found=outcomes, lists=[len(entries) for entries in (
        accelerator._models, accelerator._optimizers, accelerator._schedulers,
        accelerator._dataloaders)])
"""
TWO = [
    ("single", {}),
    ("ddp", {}),
    ("zero1", {}),
    ("fsdp", {}),
    ("tp", {}),
    ("pp", {}),
    ("cp", {}),
]
FOUR = [
    ("fsdp", {"shard": "hybrid", "replicas": 2}),
    ("fsdp", {"tp": 2}),
    ("pp", {"dp": 2}),
    ("pp", {"tp": 2}),
    ("cp", {"dp": 2}),
]


@pytest.mark.parametrize(
    ("size", "rows"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.parity)]
)
def test_the_same_cell_trains_alike_under_every_strategy(
    tmp_path: Path, size: int, rows: list[object]
) -> None:
    """Loss, norm and rate of each step, with accumulation too; ranks' seeds do not matter."""
    results = run_ranks(tmp_path, size, MODEL + ROWS, ROWS=json.dumps(rows))

    for result in results:
        for row, difference in result["found"].items():
            assert isinstance(difference, float), f"{row}\n{difference}"
            assert difference < 2e-6, row
        assert len(result["found"]) == 2 * len(rows)
        assert result["lists"] == [0, 0, 0, 0]  # what cells left behind is gone
