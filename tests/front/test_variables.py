"""%dist_push and %dist_pull, typed in real kernels with real ranks, with torch and without it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.conftest import START_TIMEOUT_S, Shared
from tests.support.kernel import Kernel
from tests.support.ranks import until
from tests.support.terminal import environment

_HAS_TORCH = "import sys; 'torch' in sys.modules"
_NAMES = "sorted(name for name in dir() if not name.startswith('_'))"
# What can be pickled, and cannot be made anew: everywhere, or on rank 1 alone.
RAISING = """
import numpy as np
class Raising:
    def __init__(self, code): self.code = code
    def __reduce__(self): return eval, (self.code,)
on_one = Raising("__import__('os').environ['RANK'] == '1' and 1 / 0")
stuck = [
    Raising("__import__('pathlib').Path('reached').touch(), __import__('time').sleep(300)"),
    np.zeros(2_000_000, np.uint8),
]
"""
_SPLIT = """%%distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh('cpu', (2,))
split = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
"""


@pytest.fixture(scope="module")
def torch_kernel(_shared_kernel: Shared, shared_folder: Path) -> Iterator[Kernel]:
    """A notebook that has imported torch and attached to the shared kernel's ranks."""
    _shared_kernel.run("%dist_detach 10m")
    _shared_kernel.is_clear = False
    with Kernel(cwd=shared_folder, env=environment(shared_folder)) as kernel:
        for code in ("%load_ext nbdist", "%dist_attach", "import torch"):
            cell = kernel.run(code, START_TIMEOUT_S)
            assert cell.status == "ok", cell.visible
        yield kernel
        kernel.run("%dist_shutdown")


def run_of(kernel: Kernel) -> str:
    """The name of the folder of this kernel's ranks."""
    return kernel.run("import nbdist; nbdist.session().cluster.run_dir.name").plain[0].strip("'")


def left(run: str) -> list[Path]:
    """Folders of these ranks in /dev/shm."""
    return list(Path("/dev/shm").glob(f"nbdist-{os.getuid()}-{run}-*"))


def error_of(kernel: Kernel, code: str) -> tuple[str, str]:
    return kernel.run(code).failure[:2]


def test_objects_and_arrays_go_to_all_ranks_and_come_back(kernel: Kernel) -> None:
    """One line for each variable; a list in rank order."""
    kernel.run(
        "import numpy as np; words = {'a': [1, 'b']}; numbers = np.arange(6.0).reshape(2, 3)"
    )
    pushed = kernel.run("%dist_push words numbers")
    kernel.run("%%distributed\nnumbers[0, 0] = rank; words['rank'] = rank")
    pulled = kernel.run("%dist_pull numbers words")
    seen = kernel.run("[n[0].tolist() for n in numbers], words")

    assert pushed.plain == [
        "words to ranks 0-1: dict of 1\nnumbers to ranks 0-1: array float64 (2, 3)"
    ]
    assert "".join(pulled.plain) == (
        "numbers from ranks 0-1: list of 2 arrays float64 (2, 3)\n"
        "words from ranks 0-1: list of 2, each dict of 2"
    )
    assert "".join(seen.plain) == (
        "([[0.0, 1.0, 2.0], [1.0, 1.0, 2.0]],\n"
        " [{'a': [1, 'b'], 'rank': 0}, {'a': [1, 'b'], 'rank': 1}])"
    )


def test_only_the_ranks_that_are_named_are_touched(kernel: Kernel) -> None:
    """One rank binds the value itself."""
    kernel.run("%%distributed\nmine = None")
    kernel.run("mine = 5")
    pushed = kernel.run("%dist_push mine --ranks 1")
    there = kernel.run("%%distributed\nmine")
    pulled = kernel.run("%dist_pull mine --ranks 0")
    here = kernel.run("mine is None")

    assert pushed.plain == ["mine to rank 1: int"]
    assert there.text == "[1] 5\n"
    assert pulled.plain == ["mine from rank 0: NoneType"]
    assert here.plain == ["True"]


def test_without_torch_tensors_become_arrays_and_torch_stays_unloaded(kernel: Kernel) -> None:
    """What numpy lacks becomes float32, which is said once."""
    kernel.run(
        "%%distributed\nlow = torch.tensor([1.5, -3.140625], dtype=torch.bfloat16)\n"
        "loss = (torch.ones(3, requires_grad=True) * (rank + 1)).sum()"
    )
    first = kernel.run("%dist_pull low --ranks 0")
    again = kernel.run("%dist_pull low loss")
    seen = kernel.run("low[1].tolist(), [float(one) for one in loss]")

    assert "".join(first.plain) == (
        "low from rank 0: array float32 (2,)\n"
        "numpy has no bfloat16: the values were converted to float32, exactly. After "
        "`import torch` in the notebook, tensors arrive as tensors"
    )
    assert "".join(again.plain) == (
        "low from ranks 0-1: list of 2 arrays float32 (2,)\n"
        "loss from ranks 0-1: list of 2 arrays float32 ()"
    )
    assert seen.plain == ["([1.5, -3.140625], [3.0, 6.0])"]
    assert kernel.run(_HAS_TORCH).plain == ["False"]


def test_pulling_binds_nothing_else(kernel: Kernel) -> None:
    """Also in automatic mode, where the verbs run in the notebook."""
    kernel.run("%%distributed\npulled_alone = rank")
    before = kernel.run(_NAMES).plain[0]
    kernel.run("%dist_mode all")
    printed = kernel.run("%dist_pull pulled_alone")
    kernel.run("%dist_mode local")
    after = kernel.run(_NAMES).plain[0]
    kernel.run("del pulled_alone")

    assert printed.plain == ["pulled_alone from ranks 0-1: list of 2, each int"]
    assert "pulled_alone" in after
    assert kernel.run(_NAMES).plain[0] == before


_WRONG_NAMES = {
    "%dist_push a.b": "'a.b' is not a variable name",
    "%dist_push known_name --ranks 7": "rank 7 does not exist",
    "%dist_pull on_one": "on_one exists on rank 1, not on rank 0; nothing was pulled. %dist",
    "%dist_pull on_one --whole --ranks 1": "on_one exists on rank 1, not on rank 0",
}


def test_a_name_that_is_wrong_is_told(kernel: Kernel) -> None:
    """Nothing is bound under it."""
    kernel.run("known_name = 1; globals().pop('on_one', None)")
    kernel.run("%%distributed\nglobals().pop('on_one', None);")
    kernel.run("%%rank [1]\non_one = 1")
    for code, reason in _WRONG_NAMES.items():
        name, message = error_of(kernel, code)

        assert name == "OptionError", code
        assert reason in message, (code, message)
        assert kernel.run("'on_one' in dir()").plain == ["False"], code


def test_what_cannot_be_sent_or_made_changes_nothing(kernel: Kernel) -> None:
    """On no rank, also where one of them could have made it; and the ranks go on."""
    kernel.run(RAISING)
    kernel.run("%%distributed\non_one = generator = 'old'")
    kernel.run("generator = (n for n in [1]); fine = 1")
    unsent = error_of(kernel, "%dist_push fine generator")
    unmade = error_of(kernel, "%dist_push on_one")
    printed = kernel.run("%%distributed\non_one, generator")
    # What the others received of it is not held.
    received = kernel.run("%%distributed\nfrom nbdist.variables import rank as r; r._received")

    assert unsent[0] == unmade[0] == "TransferError"
    assert unsent[1].startswith("generator cannot be sent: TypeError: cannot pickle 'generator'")
    assert unmade[1] == (
        "rank 1: the value cannot be unpacked: ZeroDivisionError: division by zero. Nothing was "
        "pushed."
    )
    assert printed.text == "[0-1] ('old', 'old')\n"
    assert received.text == "[0-1] {}\n"


def test_what_ranks_cannot_send_or_the_notebook_cannot_make_binds_nothing(kernel: Kernel) -> None:
    """The notebook's old value stays."""
    kernel.run("raising = lock = module = 'old'")
    kernel.run(f"%%distributed\nimport threading\n{RAISING}\nlock = threading.Lock()")
    kernel.run("%%distributed\nraising = Raising('1 / 0'); module = torch.nn.Linear(1, 1)")
    unsent = error_of(kernel, "%dist_pull lock")
    unmade = error_of(kernel, "%dist_pull raising")
    needs = error_of(kernel, "%dist_pull module")
    ours = error_of(kernel, "%dist_pull accelerator")
    printed = kernel.run("raising, lock, module")

    assert unsent[0] == unmade[0] == needs[0] == "TransferError"
    assert unsent[1] == (
        "rank 0: lock cannot be sent: TypeError: cannot pickle '_thread.lock' object. "
        "Nothing was pulled."
    )
    assert unmade[1] == (
        "in the notebook, from rank 0: the value cannot be unpacked: ZeroDivisionError: division "
        "by zero. Nothing was pulled."
    )
    assert "it contains torch.nn.modules.linear.Linear: `import torch` in the notebook" in needs[1]
    assert "Accelerator: it belongs to its rank. Pull its contents" in ours[1]
    assert printed.plain == ["('old', 'old', 'old')"]
    assert kernel.run(_HAS_TORCH).plain == ["False"]


def test_classes_of_cells_are_found_by_name(kernel: Kernel) -> None:
    """Where both have defined them."""
    definition = "class Settings:\n    def __init__(self, lr): self.lr = lr\n"
    kernel.run(f"{definition}settings = Settings(0.5)")
    kernel.run(f"%%distributed\n{definition}")
    kernel.run("%dist_push settings")
    there = kernel.run("%%distributed\nsettings.lr, type(settings) is Settings")
    kernel.run("%dist_pull settings --ranks 0")
    here = kernel.run("settings.lr, type(settings) is Settings")

    assert there.text == "[0-1] (0.5, True)\n"
    assert here.plain == ["(0.5, True)"]


_FUNCTIONS = """
import dataclasses, functools, math, threading
factor, lock = 3, threading.Lock()
@dataclasses.dataclass
class Pair:
    left: int
    right: int = 2
    class Inner: pass
    @functools.cached_property
    def total(self): return self.left + self.right
def scaled(x): return math.floor(x * factor)
def pushed(x):
    with lock: pass
    return scaled(x)
def summed(x):
    def inner(): return scaled(x) + rank
    return inner()
pair = Pair(1), Pair.Inner()
"""


def test_functions_and_classes_of_cells_go_with_what_they_use(kernel: Kernel) -> None:
    """Named, and what cannot go; there they are as if their cell had run there."""
    names = ("factor", "math", "scaled", "lock", "Pair")
    kernel.run(f"%%distributed\nfor name in {names}: globals().pop(name, None)")
    kernel.run(_FUNCTIONS)
    first = kernel.run("%dist_push summed pair pushed")
    used = kernel.run("%%distributed\nsummed(1.5), pair[0].total, type(pair[1]) is Pair.Inner")
    child = kernel.run(
        "%%distributed\nimport dataclasses\n@dataclasses.dataclass\nclass Triple(Pair):\n"
        "    last: int = 0\nTriple(1), Pair(4)"
    )
    lacking = kernel.run("%%distributed\npushed(1)")
    kernel.run("%%rank [1]\nfactor = 10")
    kernel.run("factor = 100")
    again = kernel.run("%dist_push scaled")
    printed = kernel.run("%%distributed\nsummed(1.5)")

    assert "".join(first.plain).splitlines() == [
        "summed to ranks 0-1: function",
        "pair to ranks 0-1: tuple of 2",
        "pushed to ranks 0-1: function",
        "sent along, as it is used there: Pair, factor, math, scaled",
        "used, but lock cannot be sent: TypeError: cannot pickle '_thread.lock' object.",
    ]
    assert used.text == "[0] (4, 3, True)\n[1] (5, 3, True)\n"
    assert child.text == "[0-1] (Triple(left=1, right=2, last=0), Pair(left=4, right=2))\n"
    assert "name 'lock' is not defined" in lacking.failure.evalue
    assert "with lock: pass" in lacking.failure.traceback
    assert "".join(again.plain).splitlines() == [
        "scaled to ranks 0-1: function",
        "used as the ranks have it: factor (%dist_push factor replaces it)",
    ]
    assert printed.text == "[0] 4\n[1] 16\n"


def test_an_interrupt_leaves_no_file_and_the_ranks_idle(
    kernel: Kernel, shared_folder: Path
) -> None:
    """While a rank makes the value, its bytes lie in /dev/shm."""
    kernel.run(RAISING)
    run = run_of(kernel)
    kernel.run("%%distributed\nstuck = 'old'")
    handle = kernel.start("%dist_push stuck")
    assert until((shared_folder / "reached").exists, 20)
    on_the_way = [file.stat().st_size for folder in left(run) for file in folder.iterdir()]
    kernel.interrupt()
    cell = kernel.finish(handle)
    printed = kernel.run("%%distributed\nstuck")

    cell.check_failure("KeyboardInterrupt", "had not answered; nothing was pushed$")
    assert on_the_way[0] > 2_000_000
    assert left(run) == []
    assert printed.text == "[0-1] 'old'\n"


def test_each_ranks_copy_of_a_large_tensor_is_its_own(torch_kernel: Kernel) -> None:
    """20 MB to both ranks and back: what a rank writes, nobody else sees; no file is left."""
    kernel = torch_kernel
    kernel.run("big = torch.arange(5_000_000, dtype=torch.float32); own = big")
    pushed = kernel.run("%dist_push big")
    kernel.run("%%rank [1]\nbig[:10] = -1")
    there = kernel.run("%%distributed\nbig[9].item(), big[-1].item(), big.is_contiguous()")
    pulled = kernel.run("%dist_pull big")
    seen = kernel.run(
        "torch.equal(big[0], own), torch.equal(big[1][10:], own[10:]), set(big[1][:10].tolist())"
    )
    kernel.run("big[0].zero_()")
    after = kernel.run("%%distributed\nbig[-1].item()")
    kernel.run("del big, own")
    kernel.run("%%distributed\ndel big")

    assert pushed.plain == ["big to ranks 0-1: tensor float32 (5000000,)"]
    assert there.text == "[0] (9.0, 4999999.0, True)\n[1] (-1.0, 4999999.0, True)\n"
    assert pulled.plain == ["big from ranks 0-1: list of 2 tensors float32 (5000000,)"]
    assert seen.plain == ["(True, True, {-1.0})"]
    assert after.text == "[0-1] 4999999.0\n"
    assert left(run_of(kernel)) == []


def test_a_dtensor_comes_as_a_part_or_whole(torch_kernel: Kernel) -> None:
    """The part with a remark; gathered on request, from one rank too."""
    kernel = torch_kernel
    kernel.run(f"{_SPLIT}holder = {{'w': torch.nn.Parameter(split), 'plain': rank}}")
    part = kernel.run("%dist_pull split")
    parts = kernel.run("[one.tolist() for one in split]")
    whole = kernel.run("%dist_pull split holder --whole --ranks 1")
    seen = kernel.run("split.tolist(), holder['w'].tolist(), holder['plain'], type(split).__name__")
    after = kernel.run("%%distributed\nsplit.full_tensor().sum().item()")

    assert "".join(part.plain) == (
        "split from ranks 0-1: list of 2 tensors float32 (2, 2)\n"
        "DTensors arrive as each rank's local part; --whole gathers them"
    )
    assert parts.plain == ["[[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]"]
    assert whole.plain == [
        "split from rank 1: tensor float32 (4, 2)\nholder from rank 1: dict of 2"
    ]
    rows = "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]"
    assert seen.plain[0].replace("\n", "") == f"({rows}, {rows}, 1, 'Tensor')"
    assert after.text == "[0-1] 28.0\n"


def test_a_rank_that_cannot_gather_keeps_nobody_waiting(torch_kernel: Kernel) -> None:
    """The others are freed, its error is told, and collectives work again."""
    kernel = torch_kernel
    kernel.run(f"{_SPLIT}import threading\nmixed = split if rank == 0 else threading.Lock()")
    name, message = error_of(kernel, "%dist_pull mixed --whole")
    after = kernel.run("%%distributed\nsplit.full_tensor().sum().item()")

    assert name == "TransferError"
    assert message.startswith("rank 1: mixed cannot be sent: TypeError: cannot pickle")
    assert after.text.endswith("[0-1] 28.0\n")
    assert kernel.run("'mixed' in dir()").plain == ["False"]
    assert left(run_of(kernel)) == []
