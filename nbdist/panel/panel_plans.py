"""What the panel says of the memory that the chosen strategy would take."""

from __future__ import annotations

from nbdist.cells.kernel.session import Session
from nbdist.commands.plan import device_of_ranks
from nbdist.panel import kernel as ranks_panel
from nbdist.panel import plan as panel_panel_plan
from nbdist.panel import strategy_form
from nbdist.panel.kernel import Known
from nbdist.panel.plan import Limit
from nbdist.panel.state import Plan
from nbdist.strategy.choice import Strategy


def plan(session: Session, choice: Strategy, known: Known, current: Strategy) -> Plan:
    """By the formulas of %dist_plan, of the models that a rank has told of; at once."""
    if known.models and known.sketches:
        return panel_panel_plan.plan_of(choice, known.sketches, limit(session), current)
    text = strategy_form.planned(choice, known.models, current)
    if known.problem:
        text += f"; states only: no rank could describe the models ({known.problem})"
    return Plan(text, is_possible=True)


def limit(session: Session) -> Limit:
    """Of the device as %dist_plan takes it; of one that the catalogue lacks, as it is measured."""
    device, _ = device_of_ranks(session.topology)
    found = ranks_panel.limit(session)
    return Limit(device.memory_bytes, has_gpu=True) if device is not None else found
