"""Models and steps of odd kinds: no false alarm, nothing lost, and refusals that say what to do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks
from tests.verification.texts import SETUP

TEXT = (
    SETUP
    + """
    class Twice(Net):
        "One block that runs twice."
        def __init__(self, **options):
            super().__init__(**options)
            self.blocks, self.places = torch.nn.ModuleList([Block()]), None
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in (self.blocks[0], self.blocks[0]):
                x = block(x)
            return self.head(self.norm(x))
    class InPlaceBlock(Block):
        "It changes what it is given, and what its norm gives."
        def __init__(self):
            super().__init__()
            self.act = torch.nn.ReLU(inplace=True)
        def forward(self, x):
            x.add_(0.1)
            x = x + self.attention(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.act(self.norm2(x)))))
    class InPlace(Net):
        def __init__(self, **options):
            super().__init__(**options)
            self.blocks = torch.nn.ModuleList(InPlaceBlock() for _ in range(2))

    out = {}
    def case(name, run):
        step()
        before = state()
        out[name] = shown(run()) | {"is_back": state() == before}
        reset()
    for name in os.environ["CASES"].split(", "):
        kind, strategy = name.rsplit(" ", 1)
        start(strategy, kind={"twice": Twice, "in place": InPlace}[kind])
        case(name, verified)
    if "MORE" in os.environ:
        done(**out)

    start("tp")
    counts = {"before": 0, "after": 0, "backward": 0}
    def count(what):
        def hook(*_):
            counts[what] += 1
        return hook
    up = unwrapped().blocks[0].up
    up.register_forward_pre_hook(count("before"))
    up.register_forward_hook(count("after"))
    up.register_full_backward_hook(count("backward"))
    out["hooks"] = shown(verified())
    out["counts"] = dict(counts)
    step()
    out["counts_after"] = dict(counts)
    reset()

    start("ddp")
    (run_dir / f"seeds.{rank}").write_text("".join(f"{i}\\n" for i in range(100)))
    seeds = open(run_dir / f"seeds.{rank}")
    def seeded(seed):
        return torch.randint(24, (4, 17), generator=torch.Generator().manual_seed(seed * n + rank))
    case("file", lambda: verified(batch=lambda: seeded(int(seeds.readline()))))
    start("ddp")
    unwrapped().blocks[0].up.register_forward_hook(
        lambda m, a, out: out * (1 + (time.perf_counter_ns() % 1000) / 1e4))
    case("clock in a module", verified)

    start("ddp")
    step()
    before = state()
    def fail(module, args):
        if registry.current().name == "single" and rank == 1:
            raise ValueError("only here")
    handle = unwrapped().blocks[1].register_forward_pre_hook(fail)
    out["on one rank"] = refusal(verified, ValueError, NbdistError), state() == before
    handle.remove()
    def more():
        if registry.current().name == "single" and rank == 1:
            step(batch=lambda: fixed)
    fixed = torch.randint(24, (4, 17))
    verify_more = lambda: verify(StepRequest(code="step(batch=lambda: fixed); more()"))
    out["more forwards"] = refusal(verify_more), state() == before
    def everywhere():
        raise ValueError("everywhere")
    out["on all ranks"] = (
        refusal(lambda: verified(after_backward=everywhere), ValueError), state() == before)
    def of_length():
        return torch.randint(24, (4, 17 - 4 * rank))
    out["lengths"] = refusal(lambda: verified(batch=of_length)), state() == before
    out["no such inputs"] = refusal(lambda: verify(StepRequest(inputs="nothing_here")))
    out["is_right_afterwards"] = shown(verified())["first"]
    first = model, optimizer
    model, optimizer = accelerator.prepare(Net(), torch.optim.SGD(Net().parameters(), lr=0.1))
    out["several"] = refusal(lambda: verify(StepRequest()))
    del first
    reset()
    out["none"] = refusal(lambda: verify(StepRequest(code="pass")))
    start("ddp")
    def add():
        unwrapped().scale = torch.nn.Parameter(torch.ones(()))
        optimizer.add_param_group({"params": [unwrapped().scale]})
    out["added in the step"] = (
        refusal(lambda: verified(after_step=add)), len(optimizer.param_groups) == 1)
    out["added before"] = refusal(verified)
    reset()
    start("ddp", compile=True)
    out["compiled"] = refusal(verified)
    done(**out)
"""
)


SOME, OTHERS = ("twice fsdp", "in place tp"), ("twice ddp", "twice tp", "in place ddp")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("bad"), 2, TEXT, CASES=", ".join(SOME))


def test_shared_modules_and_changes_in_place_are_right(results: list[dict[str, Any]]) -> None:
    """A block that runs twice, x.add_() of a module's input, and ReLU(inplace=True)."""
    check_right(results, SOME)


@pytest.mark.parity
def test_so_they_are_under_other_strategies(tmp_path: Path) -> None:
    """Whole on each rank; split."""
    check_right(run_ranks(tmp_path, 2, TEXT, CASES=", ".join(OTHERS), MORE="yes"), OTHERS)


def check_right(results: list[dict[str, Any]], cases: Sequence[str]) -> None:
    for shown in results:
        for case in cases:
            assert shown[case]["first"] is None, shown[case]
            assert shown[case]["findings"] == []
            assert shown[case]["not_compared"] == {}
            assert shown[case]["is_back"]


def test_hooks_of_the_user_are_called_and_kept(results: list[dict[str, Any]]) -> None:
    """Three runs of a right step call each of them three times, and a later step once more."""
    for shown in results:
        assert shown["hooks"]["first"] is None, shown["hooks"]
        assert shown["counts"] == {"before": 3, "after": 3, "backward": 3}
        assert shown["counts_after"] == {"before": 4, "after": 4, "backward": 4}


def test_a_step_that_reads_a_file_or_a_clock_is_told(results: list[dict[str, Any]]) -> None:
    """As other inputs where its batch comes from there, as not the same twice within a module."""
    for shown in results:
        assert "the model got another batch when the step was run again" in " ".join(
            shown["file"]["findings"]
        )
        assert shown["file"]["is_back"]
        assert shown["clock in a module"]["module"] == "blocks.0.up"
        said = " ".join(shown["clock in a module"]["findings"])
        assert "two runs of the reference differ from blocks.0.up on" in said


def test_a_step_that_fails_puts_everything_back(results: list[dict[str, Any]]) -> None:
    """On one rank of the reference no other waits for it; the error is named on all ranks."""
    assert results[1]["on one rank"] == ["only here", True]
    text, is_back = results[0]["on one rank"]
    assert "failed on rank 1. rank 1: ValueError: only here" in text
    assert is_back
    for shown in results:
        text, is_back = shown["more forwards"]
        assert "Rank 0 ended its step" in text
        assert is_back
        assert shown["on all ranks"] == ["everywhere", True]
        assert shown["is_right_afterwards"] is None


def test_what_cannot_be_verified_is_refused(results: list[dict[str, Any]]) -> None:
    """No model, several without a step, unknown inputs, other lengths, parameters, --compile."""
    for shown in results:
        text, is_back = shown["lengths"]
        assert "(4, 16), (4, 12)" in text
        assert "Pad them" in text
        assert is_back
        assert "nothing_here" in shown["no such inputs"]
        assert "There are several prepared models" in shown["several"]
        text, is_back = shown["added in the step"]
        assert text.startswith("scale of model came or went after prepare()")
        assert is_back
        assert shown["added before"] == text
        assert "There is no prepared model" in shown["none"]
        assert "Verify without it: %dist_strategy ddp" in shown["compiled"]
