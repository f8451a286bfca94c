"""%dist_plan of a model on the ranks."""

import re

import pytest

from tests.support.kernel import Kernel

_MODEL = """%%distributed
import torch
from torch import nn
class PlannedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))
class Planned(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.inner = nn.Linear(16, width)
        self.layers = nn.ModuleList(PlannedBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.inner.weight.requires_grad_(False)
    def forward(self, x):
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
planned_net = Planned()
planned_opt = torch.optim.SGD([p for p in planned_net.parameters() if p.requires_grad], lr=0.1,
                              momentum=0.9)
planned_x = torch.randn(32, 16)
planned_number, planned_odd, planned_empty = 3, nn.Linear(3, 3 + rank), nn.Module()
before = {n: p.clone() for n, p in planned_net.named_parameters()}
"""
_EXPERTS = """%%distributed
class PlannedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 320) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 320, 16) * 0.1)
    def forward(self, x, which, weights):
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, k = torch.where(which == e)
            y = torch.relu(x[token] @ self.up[e]) @ self.down[e]
            out = out.index_add(0, token, y * weights[token, k, None])
        return out
class PlannedMixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.ep_plan = {"experts": "experts"}
        self.router, self.experts, self.head = nn.Linear(16, 4), PlannedExperts(), nn.Linear(16, 10)
    def forward(self, x):
        weights, which = self.router(x).softmax(-1).topk(2)
        return self.head(x + self.experts(x, which, weights))
planned_mixture = PlannedMixture()
planned_adam = torch.optim.AdamW(planned_mixture.parameters())
planned_mixture, planned_adam = accelerator.prepare(planned_mixture, planned_adam)
"""
_MISTAKES = {
    "planned_nets": "There is no variable planned_nets on the ranks. Models there: ",
    "planned_number": "planned_number on the ranks is a int, not a model",
    "planned_net.head.nope": "has no head.nope",
    "planned_empty": "planned_empty (Module) has no parameters",
    "planned_odd": "planned_odd differs between ranks: rank 1 has Linear (16 parameters)",
    "planned_net --inputs planned_number": "--inputs planned_number holds a int without a tensor",
    "planned_net --inputs nope": "--inputs nope: there is no such variable on the ranks",
    "planned_net --engine slow": "no --engine slow. Choose one of formulas, fake",
    "7e9 --inputs planned_x": "--inputs names the inputs of a model on the ranks",
}


@pytest.fixture(scope="module", name="ranks")
def _ranks(_shared_kernel: Kernel) -> Kernel:
    cell = _shared_kernel.run(_MODEL)
    assert cell.status == "ok", cell.visible
    return _shared_kernel


def row(text: str, name: str) -> list[str]:
    rows = re.search(rf"^{re.escape(name)}  .*$", text, re.MULTILINE)
    assert rows is not None, text
    return rows[0].split()


def test_a_mixture_of_experts(ranks: Kernel) -> None:
    """Rows for sharing its experts, whose states a step then has: half of them, and the rest.

    4 x 16 x 320 x 2 numbers are in experts, 68 and 170 in router and head.
    """
    chosen = ranks.run("%dist_strategy ep")
    cell = ranks.run(_EXPERTS)
    plan = ranks.run("%dist_plan planned_mixture --inputs planned_x").plain[-1]
    step = ranks.run("%dist_plan planned_mixture --inputs planned_x --check").plain[-1]
    ranks.run("%%distributed\ndel planned_mixture, planned_adam")
    back = ranks.run("%dist_strategy ddp")

    assert chosen.status == cell.status == back.status == "ok", (cell.visible, back.visible)
    assert "40,960 float32 trained in experts" in plan
    assert row(plan, "fsdp --ep 2")
    assert row(plan, "ep --ep 2")
    held = round(4 * (40960 // 2 + 68 + 170) / 1e6, 3)
    assert "a step under ddp x ep, dp 2 (experts over ep 2)" in step
    assert checked(step)["parameters"] == checked(step)["gradients"] == (held, held), step
    assert checked(step)["optimizer"] == pytest.approx((2 * held, 2 * held), abs=0.001)


def test_a_model_of_a_cell(ranks: Kernel) -> None:
    """Any architecture: states by its own layout, activations by a run; nothing of it changes.

    The process that counts takes longer to start than nothing is shown: it says what it counts.
    """
    handle = ranks.start("%dist_plan planned_net --inputs planned_x")
    ranks.wait_output(handle, "plan: counting single")
    cell = ranks.finish(handle, 120.0)
    after = ranks.run(
        "%%distributed\nprint(all(torch.equal(before[n], p) and p.grad is None "
        "for n, p in planned_net.named_parameters()), len(planned_opt.state))"
    )
    text = cell.plain[-1]
    # Three blocks of 2 * 4 * 64^2 + 5 * 64, the way in (16 + 1) * 64 and out (64 + 1) * 10.
    count, frozen = 3 * (8 * 64**2 + 5 * 64) + 17 * 64 + 650, 16 * 64

    assert cell.status == "ok", cell.visible
    assert "plan: counting" not in cell.visible
    assert len(cell.outputs) == 1
    assert f"planned_net: {count:,} parameters, on 2 ranks" in text
    assert f"{count - frozen:,} float32 trained (0.4 MB)" in text
    assert "blocks: layers (3 x PlannedBlock); SGD; called with (32, 16) float32" in text
    assert "batch 32 on each data-parallel rank, momentum" in text
    # MB: all of it, what is trained, and as much for the momentum.
    assert row(text, "single")[2:5] == ["0.4", "0.4", "0.4"]
    assert row(text, "fsdp")[3:6] == ["0.2", "0.2", "0.2"]
    assert row(text, "fsdp")[12] == "safe"
    assert "tp: Planned: nbdist knows none of its layer names" in text
    assert "pp: activations not counted: a pipeline's stages wait for each other." in text
    assert "True 0" in after.visible


def test_a_prepared_model(ranks: Kernel) -> None:
    """Whole, as the user wrote it, whatever strategy it is under."""
    made = ranks.run(
        "%%distributed\nplanned_ready = accelerator.prepare(Planned())\n"
        "planned_type = type(planned_ready).__name__"
    )
    cell = ranks.run(
        "%dist_plan planned_ready --engine formulas --strategy fsdp --optimizer adamw", 120.0
    )
    steps = ranks.run("%%distributed\nplanned_ready(planned_x).mean().backward(); planned_type")

    assert made.status == steps.status == "ok", (made.visible, steps.visible)
    assert "planned_ready is a Planned: " in cell.plain[-1]
    assert row(cell.plain[-1], "fsdp")[3:6] == ["0.2", "0.2", "0.4"]


@pytest.mark.parametrize("line", _MISTAKES)
def test_a_mistake_says_what_there_is(ranks: Kernel, line: str) -> None:
    assert _MISTAKES[line] in ranks.run(f"%dist_plan {line}", 120.0).failure.evalue


def test_from_python(ranks: Kernel) -> None:
    """The name of a variable on the ranks, as text; activations not counted: a question mark."""
    cell = ranks.run(
        "import nbdist; v = nbdist.plan('planned_net', engine='formulas', strategy='fsdp')\n"
        "m = v.plan.rows[0].memory; print(v.text)\n(m.engine, m.is_partial, v.plan.model.has_shape)"
    )

    assert cell.plain[-1] == "('formulas', True, False)"
    assert re.search(r"^fsdp +dp 2 .*> \d.* \?  ", cell.text, re.MULTILINE)
    assert "No strategy is recommended" in cell.text


# --check

_LLAMA = """from transformers import AutoModelForCausalLM, LlamaConfig
planned_lm = AutoModelForCausalLM.from_config(LlamaConfig(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=320,
    vocab_size=200, num_hidden_layers=3))
"""
# By its form one of transformers, whose import takes seconds in each process.
_AS_LLAMA = """from types import SimpleNamespace
class PlannedForCausalLM(nn.Module):
    config = SimpleNamespace(vocab_size=200)
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 128), nn.Linear(128, 200)
        self.layers = nn.ModuleList(PlannedBlock(128) for _ in range(3))
    def forward(self, input_ids, labels, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten()))
planned_lm = PlannedForCausalLM()
"""
_STEPPED = """planned_lm_opt = torch.optim.AdamW(planned_lm.parameters(), lr=1e-3)
planned_lm, planned_lm_opt = accelerator.prepare(planned_lm, planned_lm_opt)
tokens = torch.arange(32).view(1, 32)
planned_lm(input_ids=tokens, labels=tokens).loss.backward()
planned_lm_opt.step()
def planned_state():
    import hashlib, random
    found = hashlib.sha256()
    inner = getattr(planned_lm_opt, "optimizer", planned_lm_opt)
    tensors = [*planned_lm.parameters(), *(p.grad for p in planned_lm.parameters()),
               *planned_lm.buffers(), *(v for s in inner.state.values() for v in s.values()),
               torch.get_rng_state()]
    for one in tensors:
        found.update(one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest(), str(inner.param_groups[0]["lr"]), random.getstate(), [
        m.training for m in planned_lm.modules()], [id(p) for p in planned_lm.parameters()]
planned_lm.eval()
planned_before = planned_state()
"""


def checked(text: str) -> dict[str, tuple[float, float]]:
    """Row -> predicted and measured MB."""
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +[-+][\d.]+ %$", text, re.MULTILINE)
    return {what: (float(predicted), float(measured)) for what, predicted, measured in rows}


@pytest.mark.parametrize(
    "model",
    [_AS_LLAMA, pytest.param(_LLAMA, marks=pytest.mark.parity)],
    ids=["plain", "transformers"],
)
def test_a_step_is_measured_and_put_back(ranks: Kernel, model: str) -> None:
    """States exactly, activations and peak closely; then everything is bit by bit as before."""
    made = ranks.run(f"%%distributed\n{model}{_STEPPED}", 120.0)
    cell = ranks.run("%dist_plan planned_lm --check --batch 2 --seq 64", 180.0)
    same = ranks.run("%%distributed\nprint(planned_state() == planned_before)")
    rows = checked(cell.plain[-1])

    assert made.status == cell.status == "ok", (made.visible, cell.visible)
    assert "a step under ddp, dp 2, batch 2 x 64 tokens; everything was restored" in cell.plain[-1]
    for what in ("parameters", "gradients", "optimizer"):
        assert rows[what][0] == rows[what][1] > 0
    for what in ("activations", "peak"):
        assert rows[what][0] == pytest.approx(rows[what][1], rel=0.03)
    assert same.visible.count("True") == 1, same.visible  # of both ranks


@pytest.mark.parity
def test_a_model_that_never_stepped(ranks: Kernel) -> None:
    """It is under no strategy, and afterwards its optimizer has no state again."""
    cell = ranks.run("%dist_plan planned_net --check --inputs planned_x", 180.0)
    same = ranks.run(
        "%%distributed\nprint(len(planned_opt.state), all(p.grad is None and torch.equal(before[n],"
        " p) for n, p in planned_net.named_parameters()))"
    )
    rows = checked(cell.plain[-1])

    assert "a step under single, batch 32; everything was restored afterwards" in cell.plain[-1]
    assert rows["optimizer"][0] == rows["optimizer"][1] > 0
    assert rows["peak"][0] == pytest.approx(rows["peak"][1], rel=0.03)
    assert "0 True" in same.visible


_NOT_CHECKED = {
    "planned_net --check": "The inputs of Planned are not known",
    "7e9 --check": "7e9 is not a variable name",
    "planned_net --check --strategy fsdp": "leave --strategy out",
    "planned_net --check --bf16": "leave --bf16 out",
    "planned_head --check --inputs planned_x": "mat1 and mat2 shapes cannot be multiplied",
}


@pytest.mark.parametrize("line", _NOT_CHECKED)
def test_what_cannot_be_checked(ranks: Kernel, line: str) -> None:
    """The model's own error too; the ranks go on, and nothing has changed."""
    ranks.run("%%distributed\nplanned_head = planned_net.head")
    cell = ranks.run(f"%dist_plan {line}", 180.0)
    after = ranks.run("%%distributed\nprint(planned_head.training, planned_head.weight.grad)")

    assert _NOT_CHECKED[line] in cell.failure.evalue
    assert "True None" in after.visible


# LoRA

_CONFIG = """dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=320, vocab_size=200, num_hidden_layers=2)"""
_ADAPTED = f"""%%distributed
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
planned_lora = get_peft_model(
    AutoModelForCausalLM.from_config(LlamaConfig(**{_CONFIG})),
    LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"))
planned_lora_opt = torch.optim.AdamW(planned_lora.parameters(), lr=1e-3)
planned_lora, planned_lora_opt = accelerator.prepare(planned_lora, planned_lora_opt)
"""
_BESIDE = f"""import nbdist
words = dict(batch=2, seq=64, memory="24GB", precision="fp32")
live = nbdist.plan("planned_lora", **words).plan
typed = nbdist.plan({_CONFIG}, lora=8, targets="q_proj,v_proj,o_proj", ranks=2, **words).plan
def states(plan, *names):
    rows = [row for row in plan.rows if row.typed in names]
    what = ("parameters", "gradients", "optimizer")[len(names) == 1:]
    return [tuple(getattr(row.memory, each) for each in what) for row in rows]
same = ("single", "ddp", "fsdp", "fsdp --shard grad-op")
(states(live, *same) == states(typed, *same), states(live, "tp") == states(typed, "tp"),
 len(states(live, *same)), states(typed, "ddp"),
 [row.sent_bytes for row in live.rows] == [row.sent_bytes for row in typed.rows],
 live.model.parameters == typed.model.parameters, live.model.lora.targets)
"""
# r 8 on q 128 x 128, v 128 x 64 and out 128 x 128, in two blocks of 4 bytes each.
_TRAINED = 4 * 2 * 8 * (256 + 192 + 256)


@pytest.fixture(scope="module", name="adapted")
def _adapted(ranks: Kernel) -> Kernel:
    made = ranks.run(_ADAPTED, 120.0)
    assert made.status == "ok", made.visible
    return ranks


@pytest.mark.parity
def test_adapters_on_the_ranks_and_as_typed(adapted: Kernel) -> None:
    """A model that PEFT has made, and its config with --lora: to the byte.

    tp leaves norms whole, which formulas do not know; what is trained is the same.
    """
    beside = adapted.run(_BESIDE, 120.0)

    assert " ".join(beside.plain[-1].split()) == (
        f"(True, True, 4, [({_TRAINED}.0, {2 * _TRAINED}.0)], True, True, "
        "('o_proj', 'q_proj', 'v_proj'))"
    )


@pytest.mark.parity
def test_a_step_with_adapters(adapted: Kernel) -> None:
    """States as they are measured, and nothing of what is frozen in gradients."""
    cell = adapted.run("%dist_plan planned_lora --check --batch 2 --seq 64", 120.0)
    rows = checked(cell.plain[-1])

    assert cell.status == "ok", cell.visible
    for what in ("parameters", "gradients", "optimizer"):
        assert rows[what][0] == rows[what][1] > 0
    assert rows["gradients"][1] == pytest.approx(_TRAINED / 1e6, abs=0.01)
    assert rows["peak"][0] == pytest.approx(rows["peak"][1], rel=0.05)
