"""Tab and Shift-Tab, as a frontend asks the kernel."""

import re

import pytest

from nbdist.strategy.table import ROWS
from tests.support.kernel import Kernel

MADE = """%%distributed
rank_model, ranks_own = {"width": 3}, rank
def trained(steps: int):
    'Documented.'
"""


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(autouse=True)
def _made(kernel: Kernel) -> None:
    """Names on the ranks, and another one in the notebook."""
    assert kernel.run(MADE).status == "ok"
    assert kernel.run("rank_local = 1").status == "ok"


@pytest.mark.parametrize(
    ("code", "offered", "not_offered"),
    [
        ("%%distributed\nrank_", {"rank_model"}, {"rank_local"}),
        ("%%rank [1]\n# first\nx = rank_", {"rank_model"}, {"rank_local"}),
        ("%%rank[0]\nrank_", {"rank_model"}, {"rank_local"}),
        ("%%time\n%%dist_profile\n%%rank [1]\nrank_", {"rank_model"}, {"rank_local"}),
        ("rank_", {"rank_local"}, {"rank_model"}),
        ("%%local\nrank_", {"rank_local"}, {"rank_model"}),
        ("%%distributed\nrank_model.ite", {"rank_model.items", "items", ".items"}, set()),
        ("%dist_push rank_", {"rank_local"}, {"rank_model"}),
        ("%dist_pull ranks_own rank_", {"rank_model"}, {"rank_local"}),
    ],
)
def test_names_are_of_where_the_cell_runs(
    kernel: Kernel, code: str, offered: set[str], not_offered: set[str]
) -> None:
    """The ranks' in distributed cells, the notebook's elsewhere; of a push or pull its source's."""
    matches = set(kernel.complete(code)["matches"])

    assert offered & matches
    assert not not_offered & matches


@pytest.mark.parametrize(
    ("code", "behind", "offered", "typed"),
    [
        ("%%distributed --ranks 0\n# a comment\nprint(ranks_o)", 1, "ranks_own", "ranks_o"),
        ("%dist_pull ranks_own rank_", 0, "rank_model", "rank_"),
    ],
)
def test_what_is_typed_is_replaced_where_it_stands(
    kernel: Kernel, code: str, behind: int, offered: str, typed: str
) -> None:
    """Positions are those of the whole cell, magic and comments included."""
    cursor = len(code) - behind
    reply = kernel.complete(code, cursor)
    entry = reply["metadata"]["_jupyter_types_experimental"][0]

    assert offered in reply["matches"]
    assert code[reply["cursor_start"] : reply["cursor_end"]] == typed
    assert (entry["start"], entry["end"]) == (reply["cursor_start"], cursor)


def test_automatic_mode_asks_the_ranks(kernel: Kernel) -> None:
    """A plain cell goes to them then; %%local does not."""
    assert kernel.run("%dist_mode 1").status == "ok"
    assert "rank_model" in kernel.complete("rank_")["matches"]
    assert "rank_local" in kernel.complete("%%local\nrank_")["matches"]


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        ("%%distributed --ta", ["--tabs"]),
        ("%%distributed --ranks 0 --ti", ["--timeout"]),
        ("%dist_init --back", ["--backend"]),
        ("%dist_strategy fsdp --sh", ["--shard"]),
        ("%%distributed\nx = 1\n%dist_mode --en", ["--enable"]),
        ("%dist_init --nothing", []),
    ],
)
def test_options_behind_a_magic(kernel: Kernel, code: str, flags: list[str]) -> None:
    """The table of verbs has them."""
    assert kernel.complete(code)["matches"] == flags


@pytest.mark.parametrize(
    ("code", "offered"),
    [
        ("%dist_strategy ", sorted(ROWS)),
        ("%dist_strategy fsdp --bf16 --shard ", ["full", "grad-op", "hybrid"]),
        ("%dist_strategy --shard=gr", ["grad-op"]),
        ("%dist_strategy --tp 2 ", sorted(ROWS)),
        ("%dist_plan 7e9 --gpu rtx-4", ["rtx-4090"]),
        ("%dist_plan 7e9 --engine ", ["fake", "formulas"]),
        ('%dist_compare ddp "fs', ["fsdp", "fsdp1"]),
        ("%dist_bench --ops all_reduce,all_g", ["all_gather"]),
        ("%dist_check --silence same", ["same-data"]),
        ("%dist_init --profile lo", ["local"]),
        ("%dist_init -n ", []),
        ("%dist_mode ", ["all", "local"]),
        ("%dist_status ", ["--stacks"]),
        ("%dist_mode all ", ["--disable", "--enable"]),
        ("%%distributed ", ["--ranks", "--tabs", "--timeout"]),
    ],
)
def test_tab_offers_the_choices_and_nothing_else(
    kernel: Kernel, code: str, offered: list[str]
) -> None:
    """No names of Python, no files: of options and arguments that have choices, in every verb."""
    assert kernel.complete(code)["matches"] == offered


def test_shift_tab_shows_what_the_rank_has(kernel: Kernel) -> None:
    """Value, signature and documentation; of the notebook's own names in its own cells."""
    function = kernel.inspect("%%distributed\ntrained(")
    value = kernel.inspect("%%rank [1]\nranks_own")
    local = kernel.inspect("rank_local")
    missing = kernel.inspect("%%distributed\nrank_local")

    assert re.search(r"trained\(steps: '?int'?\)", plain(function["data"]["text/plain"]))
    assert "Documented." in function["data"]["text/plain"]
    assert "1" in value["data"]["text/plain"]
    assert (local["found"], missing["found"]) == (True, False)


def test_without_ranks_the_notebook_answers(bare_kernel: Kernel) -> None:
    """Loading twice changes nothing; after %unload_ext the kernel is as it was."""
    for code in ("%load_ext nbdist", "%reload_ext nbdist", "rank_local = 1"):
        assert bare_kernel.run(code).status == "ok"

    assert bare_kernel.complete("%%distributed\nrank_l")["matches"] == ["rank_local"]
    assert bare_kernel.complete("%dist_init --back")["matches"] == ["--backend"]
    assert bare_kernel.run("%unload_ext nbdist").status == "ok"
    assert bare_kernel.complete("%dist_init --back")["matches"] == []
    assert bare_kernel.complete("rank_l")["matches"] == ["rank_local"]
