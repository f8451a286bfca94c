"""What plans predict beside what a GPU's allocator has measured."""

import pytest

from nbdist.commands.plan import check_step
from nbdist.planner.view.check_view import PlanCheckView
from nbdist.planner.workload import Workload
from tests.support.ranks import started

_MODEL = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
lm = AutoModelForCausalLM.from_config(LlamaConfig(
    hidden_size=512, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1280,
    vocab_size=4000, num_hidden_layers=6))
lm_opt = torch.optim.AdamW(lm.parameters(), lr=1e-3)
lm, lm_opt = accelerator.prepare(lm, lm_opt)
"""


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_states_are_exact_and_the_peak_is_close(strategy: str) -> None:
    """By max_memory_allocated, which rounds each tensor up to 512 bytes."""
    with started(2, gpus="0", strategy=strategy) as session:
        session.run(_MODEL)
        view = check_step("lm", "", Workload(batch=2, sequence=256))

    assert isinstance(view, PlanCheckView)
    rows = {check.what: check for check in view.checks}
    assert view.measured is not None
    assert view.measured.is_device
    assert all(check.predicted == check.measured for check in rows.values() if check.is_exact)
    assert rows["peak"].error == pytest.approx(0, abs=0.10)
