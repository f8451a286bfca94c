"""%dist_plan in a notebook, from Python and in a terminal."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nbdist import plan
from nbdist.core import topology
from nbdist.core.gpus import GpuReading
from nbdist.core.option import options_of
from nbdist.errors import OptionError
from nbdist.monitor.process_usage import Usage
from nbdist.monitor.samples import Doing, Sample
from nbdist.planner.devices import DEVICES, Device, device_of_ranks
from nbdist.planner.request import PlanRequest
from nbdist.planner.view.plan_view import PlanView
from tests.support.kernel import Kernel
from tests.support.terminal import nbdist

_CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 10}
_MISTAKES = {
    "%dist_plan": "name one model",
    "%dist_plan 7e9 8e9": "name one model",
    "%dist_plan 7e9 --gpu h10": "no --gpu h10 in the catalogue. Did you mean h100",
    "%dist_plan 7e9 --gpu h100 --memory 24GB": "--gpu or --memory, not both",
    "%dist_plan 7e9 --ranks 0": "'0' is not a valid number of ranks",
    "%dist_plan 7e9 --batch 0": "'0' is not a whole number from 1",
    "%dist_plan 7e9 --seq x": "'x' is not a whole number from 1",
    "%dist_plan 7e9 --strategy fdsp": "Did you mean fsdp",
    "%dist_plan 7e9 --fp32 --bf16": "--fp32 and --bf16 contradict",
    "%dist_plan nowhere.json": "There is no file nowhere.json",
    "%dist_plan 7e9 --price much": "--price much is not a positive number. It is the price",
    "%dist_plan 7e9 --price -2": "--price -2 is not a positive number",
    "%dist_plan 7e9 --tokens inf": "--tokens inf is not a positive number",
    "%dist_plan 7e9 --network 0": "--network 0 is not a positive number. It is the GB/s",
    "%dist_plan 7e9 --strategy fsdp --copies": "fsdp has no such dp",
    "%dist_plan 7e9 --ranks 12 --nodes 5": "12 ranks cannot be spread evenly over 5 hosts. Use",
    "%dist_plan 7e9 --keep-free 10": "--keep-free 10 is not a percentage from 0% to below 100%",
    "%dist_plan 7e9 --check --search": "leave --search out",
    "%dist_plan 7e9 --check --lora 16": "leave --lora out",
    "%dist_plan 7e9 --lora 0": "'0' is not a rank of adapters (1 or more)",
    "%dist_plan 7e9 --lora -4": "'-4' is not a rank of adapters",
    "%dist_plan 7e9 --lora 5000": "--lora 5000 is more than q_proj has: it is 4224 x 4224",
    "%dist_plan gpt2 --lora 8 --targets q_proj": "Choose one of c_attn, c_proj, c_fc, all-linear",
    "%dist_plan 7e9 --targets q_proj": "Type --lora 16 too",
    "%dist_plan 7e9 --lora 8 --quant 3bit": "Choose one of 4bit, 4bit-double",
    "%dist_plan 7e9 --quant 4bit": "numbers of 4 bits cannot be trained",
    "%dist_plan 7e9 --memory 24GB --search": "the speed of another device is not known",
}


def test_in_a_notebook_with_ranks(kernel: Kernel) -> None:
    """As many ranks as run, on their host's CPU, in fp32; what else is asked for is typed."""
    cell = kernel.run("%dist_plan llama-3-8b --ac --seq 4096")
    shares = kernel.run(
        "import nbdist\n"
        "here = [nbdist.plan('gpt2', ranks=n).plan.device.memory_bytes for n in (1, 2, 4)]\n"
        "h100 = nbdist.plan('gpt2', gpu='h100')\n"
        "(here[0] / here[1], here[0] / here[2], h100.plan.load.has_gpu,"
        " h100.plan.rows[0].choice.options.precision)"
    )

    assert cell.status == "ok", cell.visible
    assert "on 2 ranks with their host's CPU, " in cell.plain[0]
    assert re.search(
        r"^Assumed: the CPU of the ranks' host \([\d,.]+ GB\), --ranks 2, as run here, --fp32",
        cell.plain[0],
        re.MULTILINE,
    )
    assert "Time: not estimated, since the device's speed is not known" in cell.plain[0]
    assert re.search(r"^fsdp +dp 2 ", cell.plain[0], re.MULTILINE)
    assert "<svg" in cell.data("text/html")[0]
    assert shares.plain[-1] == "(2.0, 4.0, True, 'bf16')"


def test_a_config_of_the_notebook(kernel: Kernel) -> None:
    """A variable with a config is planned for; torch is not loaded for it."""
    printed = kernel.run(
        f"import sys, nbdist; tiny = {_CONFIG!r}\n"
        "%dist_plan tiny --ranks 4 --strategy fsdp\n"
        "p = nbdist.plan(tiny, ranks=4, strategy='fsdp'); r = p.plan.rows[0]\n"
        "(r.typed, r.memory.parameters, p.advice.row.typed, 'torch' in sys.modules)"
    )
    # 2 blocks of 4 * 64 + 3 * 8 + 8 + 2 * 8 * 32 + 32 + 8 + 4 * 8, (10 + 1024) * 8, and 2 * 8.
    parameters = 2 * (4 * 64 + 32 + 2 * 256 + 40 + 32) + 1034 * 8 + 16

    assert printed.status == "ok", printed.visible
    assert f"\ngpt2: {parameters:,} parameters" in printed.plain[0]
    assert printed.plain[-1] == f"('fsdp', {parameters:.1f}, 'fsdp', False)"


def test_a_search_and_the_lines_that_take_its_choice(kernel: Kernel, tmp_path: Path) -> None:
    """Without torch; the line for a file writes it, with the options of the row."""
    searched = kernel.run(
        "%dist_plan llama-3.2-1b --ranks 8 --gpu h100 --nodes 2 --samples 16 --search"
    )
    loaded = kernel.run("import sys; 'torch' in sys.modules")
    [line] = re.findall(r"^%dist_config .*", searched.plain[0], re.MULTILINE)
    path = tmp_path / line.rpartition(" ")[2]
    written = kernel.run(f"{line.rpartition(' ')[0]} {path}")

    assert searched.status == "ok", searched.visible
    assert "<title>" in searched.data("text/html")[0]
    assert re.search(r"^%dist_strategy \w+ ", searched.plain[0], re.MULTILINE)
    assert loaded.plain == ["False"]
    assert written.status == "ok", written.visible
    assert "mixed_precision: bf16" in path.read_text()


@pytest.mark.parametrize("line", _MISTAKES)
def test_a_mistake_says_what_to_type(line: str) -> None:
    """The same words as in a notebook, without one."""
    from nbdist.commands import VERBS
    from nbdist.notebook.verb import parse

    verb = VERBS["dist_plan"]
    with pytest.raises(OptionError) as caught:
        verb.run(parse(verb, line.removeprefix("%dist_plan")).values)

    assert _MISTAKES[line] in str(caught.value)


def test_in_a_terminal(tmp_path: Path) -> None:
    """Without ranks; a config.json is read, or the folder that it lies in."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(_CONFIG))
    number = nbdist("plan", "7e9", "--ranks", "8", folder=tmp_path)
    folder = nbdist("plan", "tiny", "-n", "2", folder=tmp_path)
    file = nbdist("plan", "tiny/config.json", "-n", "2", folder=tmp_path)
    wrong = nbdist("plan", "7e9", "--gpu", "h10", folder=tmp_path)

    assert (number.returncode, number.stderr) == (0, "")
    assert re.search(r"^fsdp +dp 8 +3\.5 +3\.5 +7\.0 ", number.stdout, re.MULTILINE)
    assert "Assumed: --gpu h100, --bf16\n" in number.stdout
    assert "\ntiny: " in folder.stdout
    assert "\ngpt2: " in file.stdout
    assert wrong.returncode == 2
    assert "Did you mean h100" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[1, 2]", "config.json"), ("{", "config.json"), ("\x00", "config.json"),
     ('{"model_type": "bert"}', "no formula for"), (" " * 1_000_001, "too large for a config")],
)  # fmt: skip
def test_a_file_that_is_no_config(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)

    with pytest.raises(OptionError, match=re.escape(expected)):
        plan(str(tmp_path / "a.json"))


@pytest.mark.parametrize("model", [None, True, [7e9], object()])
def test_what_is_no_model(model: object) -> None:
    with pytest.raises(OptionError, match="is not a model to plan for"):
        plan(model)


def test_from_python() -> None:
    """Names are the flags with _ for -; ranks follow from degrees."""
    view = plan("llama-3-70b", gpu="a100-40gb", seq=4096, bf16=True, checkpoint="full",
                tp=8, pp=2, dp=4, samples=512)  # fmt: skip

    assert isinstance(view, PlanView)
    assert view.plan is not None
    [row] = view.plan.rows
    assert view.plan.world_size == 64
    assert (row.mesh, row.samples) == ("pp 2 x dp 4 x tp 8", 512)
    assert "--ranks 64, as the degrees make them" in view.text


@pytest.mark.parametrize(
    ("given", "precision", "assumed"),
    [({}, "bf16", "--gpu h100, --ranks 8, --bf16\n"),
     ({"gpu": "v100"}, "fp16", "--fp16, as NVIDIA V100 PCIe 16 GB has no bf16\n"),
     ({"gpu": "t4"}, "fp16", "--fp16, as NVIDIA T4 has no bf16\n"),
     ({"memory": "24GB"}, "bf16", "--ranks 8, --bf16\n"),
     ({"recipe": "fp32"}, "fp32", "--ranks 8, --fp32\n"),
     ({"precision": "fp32"}, "fp32", "--ranks 8\n"),
     ({"fp16": True}, "fp16", "--ranks 8\n")],
)  # fmt: skip
def test_it_is_planned_in_what_people_train_in(
    given: dict[str, Any], precision: str, assumed: str
) -> None:
    """In bf16 where the device has it, unless another precision is typed; it says which."""
    view = plan("gpt2", strategy="ddp", **given)

    assert view.plan is not None
    [row] = view.plan.rows
    assert row.choice is not None
    assert row.choice.options.precision == precision
    assert assumed in view.text


def test_python_has_every_option_of_the_verb() -> None:
    """By its flag's name; what is a run on the ranks, or a shorter word, is the verb's alone."""
    flags = {row.flags[0].removeprefix("--").replace("-", "_") for row in options_of(PlanRequest)}
    names = inspect.signature(plan).parameters.keys() - {"model", "strategy_options"}

    assert names == flags - {"check", "fp32", "ac"}


def test_costs_and_the_network_from_python() -> None:
    """A slower network takes longer; what 10^9 tokens cost, and what 500 million take."""
    given: dict[str, Any] = {"ranks": 16, "gpu": "h100", "strategy": "ddp", "bf16": True}
    slow, usual = plan("gpt2-xl", network=10, **given), plan("gpt2-xl", **given)
    priced = plan("gpt2-xl", price=2.5, tokens="500e6", **given)

    assert slow.plan is not None
    assert usual.plan is not None
    assert priced.plan is not None
    [before], [after] = usual.plan.rows, slow.plan.rows
    assert before.time is not None
    assert after.time is not None
    assert after.time.communication_s > 5 * before.time.communication_s
    assert "10 GB/s of a host between hosts" in slow.text
    assert (priced.plan.price, priced.plan.tokens) == (2.5, 5e8)
    assert re.search(r"GPU-hours for 5e8 tokens +cost\n", priced.text)
    assert "GPU-hours" not in usual.text


def test_copies_from_python() -> None:
    """dp beside tp holds 8 times as much; alone it is refused."""
    given: dict[str, Any] = {"ranks": 64, "gpu": "h100", "tp": 8, "bf16": True}
    [sharded] = plan("llama-3-8b", **given).plan.rows  # type: ignore[union-attr]
    [copies] = plan("llama-3-8b", copies=True, **given).plan.rows  # type: ignore[union-attr]

    assert (sharded.typed, copies.typed) == ("fsdp x tp", "ddp x tp")
    assert copies.memory is not None
    assert sharded.memory is not None
    assert copies.memory.states == pytest.approx(8 * sharded.memory.states)


@pytest.mark.parametrize("given", [{"tp": "two"}, {"tp": 0}, {"batch": 0}, {"nope": 1}])
def test_wrong_values_from_python(given: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        plan("7e9", **given)  # type: ignore[arg-type]


def test_fp32_can_be_typed() -> None:
    """As a flag of the verb."""
    from nbdist.commands import VERBS
    from nbdist.notebook.verb import parse

    verb = VERBS["dist_plan"]
    view = verb.run(parse(verb, "gpt2 --fp32 --strategy ddp").values)

    assert view.plan.rows[0].choice.options.precision == "fp32"


def _topology(name: str, ranks: int, devices: int) -> topology.Topology:
    gpus = tuple(topology.Gpu(i, f"GPU-{i}", name) for i in range(devices))
    return topology.plan(topology.local_reports(ranks, hostname="a", gpus=gpus, cores=8))


def test_the_device_is_that_of_the_ranks() -> None:
    """Its memory is shared where ranks share it; what is not in the catalogue is named."""
    device, note = device_of_ranks(_topology("NVIDIA H200", 2, 2))
    shared, shared_told = device_of_ranks(_topology("NVIDIA H200", 2, 1))
    k620, cpus = _topology("Quadro K620", 2, 2), _topology("", 2, 0)
    doing = Doing("idle", "idle")
    by_driver = Sample(0, 0.0, doing, gpu=GpuReading(0, "G", "K620", total_bytes=2 * 10**9))
    by_host = Sample(0, 0.0, doing, usage=Usage(0.0, 1, 1, 1, 64 * 10**9))

    assert (device, note) == (DEVICES["h200"], ("--gpu h200, as the ranks here have",))
    assert shared is not None
    assert shared.memory_bytes == 70.5e9
    assert shared_told == ("--gpu h200, which 2 ranks share here",)
    assert device_of_ranks(k620) == (
        None, ("--gpu h100, as Quadro K620 is not in the catalogue",)
    )  # fmt: skip
    assert device_of_ranks(k620, [by_driver]) == (
        Device("", "Quadro K620", 2e9), ("Quadro K620, as the ranks here have",)
    )  # fmt: skip
    assert device_of_ranks(cpus)[0] is None
    assert device_of_ranks(cpus, [by_host]) == (
        Device("", "their host's CPU", 32e9, is_cpu=True), ("the CPU of the ranks' host (64.0 GB)",)
    )  # fmt: skip


def test_the_share_is_that_of_the_smallest_host() -> None:
    """Two ranks on a host of 64 GB have more each than one on a host of 24 GB."""
    reports = [topology.EngineReport(n, host, cores=8) for n, host in enumerate("aab")]
    samples = [
        Sample(rank, 0.0, Doing("idle", "idle"), usage=Usage(0.0, 1, 1, 1, limit_bytes))
        for rank, limit_bytes in enumerate((64 * 10**9, 64 * 10**9, 24 * 10**9))
    ]

    device, note = device_of_ranks(topology.plan(reports), samples)

    assert device is not None
    assert device.memory_bytes == 24e9
    assert note == ("the CPU of the ranks' host (24.0 GB)",)
