"""The panel without widgets: what a button may do, what is queued, what a choice would hold."""

import re

import pytest

from nbdist.commands import VERBS
from nbdist.core.topology import RankPlace
from nbdist.monitor.process_usage import Usage
from nbdist.monitor.samples import STATES, Doing, Sample
from nbdist.notebook.verb import parse, strategy_given
from nbdist.panel.job_queue import JobQueue, PanelJob
from nbdist.panel.state import BUTTONS, SIGNS, bar_share, bar_text, missing, row_of
from nbdist.panel.strategy_form import (
    PreparedModel,
    chosen_options,
    describe_held,
    fields,
    pick,
    typed,
    values_of,
)
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from nbdist.strategy.footprint import RECIPES
from nbdist.strategy.options import OPTIONS, takers
from nbdist.strategy.table import ROWS

FSDP = PanelJob("apply", "%dist_strategy fsdp", "fsdp")
TP = PanelJob("apply", "%dist_strategy tp", "tp")
RESTART = PanelJob("restart", "%dist_restart 1", "1")


@pytest.fixture
def clock_s() -> list[float]:
    """A clock that goes on when told, at 1000 s."""
    return [1000.0]


@pytest.fixture
def job_queue(clock_s: list[float]) -> JobQueue:
    return JobQueue(lambda: clock_s[0])


def log(job_queue: JobQueue) -> list[str]:
    return [entry.text for entry in job_queue.log]


def test_every_state_of_a_rank_is_drawn_and_differs_without_colour() -> None:
    """A state that the monitor may tell has a sign of its own."""
    assert set(SIGNS) == set(STATES)
    for looks in zip(*SIGNS.values(), strict=True):
        assert len(set(looks)) == len(SIGNS)


def test_a_row_is_what_the_sample_says() -> None:
    """On a CPU the memory is the rank's own, of what its host may use."""
    place = RankPlace(7, 1, 1, 2, 0, "here", 5, "cpu", "", "", 1)
    usage = Usage(1.0, 400, 300, 900, 1200)
    doing = Doing("running", "running cell [3]", since_s=90.0, cell_s=10.0)
    row = row_of(place, Sample(1, 98.0, doing, usage, cpu_percent=50.0, age_s=1.0), 100.0)

    assert (row.kind, row.doing, row.busy_s) == ("running", "running cell [3]", 8.0)
    assert (row.memory_bytes, row.limit_bytes, row.share) == (300, 1200, 0.25)
    assert row.utilisation == 0.5
    assert row.age_s == 3.0
    assert row_of(place, None, 0.0).kind == "unknown"


def test_a_job_is_taken_once_and_its_end_is_logged_with_its_time(
    job_queue: JobQueue, clock_s: list[float]
) -> None:
    """Another one waits until it has ended."""
    job_queue.ask(FSDP, "")
    job_queue.ask(RESTART, "")
    assert (job_queue.take(), job_queue.take()) == (FSDP, None)
    job_queue.progress("forming groups")
    clock_s[0] += 2.5
    acting = job_queue.acting
    job_queue.finish("done so")

    assert acting == "%dist_strategy fsdp: forming groups (2 s)"
    assert job_queue.acting == ""
    assert job_queue.take() == RESTART
    assert "%dist_strategy fsdp (2.5 s): done so" in log(job_queue)


def test_pressed_twice_is_done_once(job_queue: JobQueue) -> None:
    """While it waits, and while it is under way; afterwards it can be asked for again."""
    assert job_queue.ask(RESTART, "cell [3]")
    assert not job_queue.ask(RESTART, "cell [3]")
    assert job_queue.take() == RESTART
    assert not job_queue.ask(RESTART, "")
    job_queue.finish("back")
    assert job_queue.take() is None
    assert job_queue.ask(RESTART, "")
    assert log(job_queue) == [
        "%dist_restart 1 is queued until cell [3] ends; Cancel queued removes it",
        "%dist_restart 1 is already queued",
        "%dist_restart 1 begins",
        "%dist_restart 1 is already under way",
        "%dist_restart 1 (0.0 s): back",
    ]


def test_of_two_strategies_that_wait_the_newest_counts(job_queue: JobQueue) -> None:
    """The other one is not switched to on the way."""
    job_queue.ask(FSDP, "cell [3]")
    job_queue.ask(RESTART, "cell [3]")
    job_queue.ask(TP, "cell [3]")

    assert job_queue.queued == ("%dist_restart 1", "%dist_strategy tp")
    assert "%dist_strategy fsdp is removed from the queue: %dist_strategy tp replaces it" in log(
        job_queue
    )


def test_what_is_queued_can_be_taken_back(job_queue: JobQueue) -> None:
    """All of it, with the reason."""
    job_queue.ask(FSDP, "cell [3]")
    job_queue.ask(RESTART, "cell [3]")

    assert job_queue.drop("interrupted", keep=("restart",)) == 1
    assert job_queue.queued == ("%dist_restart 1",)
    assert job_queue.drop("cancelled") == 1
    assert job_queue.take() is None
    assert log(job_queue)[-1] == "%dist_restart 1 is removed from the queue: cancelled"


def test_a_recording_is_for_one_cell(job_queue: JobQueue) -> None:
    """A second press takes it back; another button's takes its place."""
    job_queue.arm("profile")
    job_queue.arm("memory")
    armed = job_queue.armed
    job_queue.arm("memory")

    assert armed == ("memory",)
    assert job_queue.armed == ()
    job_queue.arm("profile")
    assert [job_queue.disarm(), job_queue.disarm()] == ["profile", ""]


def test_the_log_keeps_the_newest_lines(job_queue: JobQueue) -> None:
    """However long the notebook runs."""
    for number in range(1000):
        job_queue.note(str(number))

    assert log(job_queue)[-1] == "999"
    assert len(log(job_queue)) == 200


def test_a_progress_bar_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """tqdm's own, as it writes it; a bar without a percentage has no length."""
    tqdm = pytest.importorskip("tqdm").tqdm
    with tqdm(total=80, ncols=60, desc="epoch 2") as shown_bar:
        shown_bar.update(20)
        shown_bar.refresh()
    bar = "[0] " + capsys.readouterr().err.split("\r")[-1].strip()

    assert bar_share(bar) == 0.25
    assert bar_text(bar).startswith("[0] epoch 2:  25% 20/80 [")
    assert bar_share("[0] 20 of 80") is None
    assert bar_text("[0] 20 of 80") == "[0] 20 of 80"


@pytest.mark.parametrize("name", BUTTONS)
def test_a_button_says_why_it_does_nothing(name: str) -> None:
    """A reason where a fact is missing, nothing where all are there."""
    needs = BUTTONS[name].needs

    assert missing(name, needs) == ""
    for need in needs:
        assert missing(name, set(needs) - {need}), need


@pytest.mark.parametrize("name", ROWS)
def test_the_fields_of_a_strategy_are_its_options(name: str) -> None:
    """Each option of the table that takes this strategy, and no other; then its degrees."""
    words = [field.word for field in fields(name, 8)]
    options = [row.word for row in OPTIONS.values() if name in takers(row)]

    assert words[len(words) - len(options) :] == options
    assert set(words) - set(options) <= {"dp", "tp", "pp", "cp", "ep", "replicas"}


@pytest.mark.parametrize("name", ROWS)
def test_labels_are_words(name: str) -> None:
    """Nothing to be typed, and no two alike."""
    labels = [field.label for field in fields(name, 8)]

    assert all(re.fullmatch(r"[A-Za-z][A-Za-z ().-]+", label) for label in labels), labels
    assert len({*labels}) == len(labels)


@pytest.mark.parametrize("name", ROWS)
def test_each_value_of_each_field_can_be_had_or_says_why(name: str) -> None:
    """Alone on 8 ranks: a choice with just that, also as it is typed, or the reason why not."""
    for field in fields(name, 8):
        for value in field.choices if field.kind != "switch" else (True,):
            picked = pick(name, {field.word: value}, 8)
            if isinstance(picked, Strategy):
                # What is shown for it gives it again.
                again = pick(picked.name, values_of(picked), 8)
                assert again == picked, (field.word, value)
                read = parse(VERBS["dist_strategy"], typed(name, {field.word: value})).values
                assert choose(*read.named, strategy_given(read), 8) == picked
            else:
                assert picked.endswith((".", "?")), (field.word, value)


def test_fields_left_alone_say_nothing() -> None:
    """Neither to choose, nor in the line that would be typed."""
    values = {"tp": "2", "bucket": "", "find_unused": False, "sequence_parallel": True}

    assert chosen_options(values) == {"tp": "2", "sequence_parallel": True}
    assert typed("fsdp", values) == "fsdp --tp 2 --sequence-parallel"


def test_a_number_is_read_or_refused_with_the_options_words() -> None:
    """As a typed one."""
    choice = pick("ddp", {"bucket": "12.5"}, 2)
    refused = pick("ddp", {"bucket": "much"}, 2)

    assert isinstance(choice, Strategy)
    assert choice.options.bucket_mb == 12.5
    assert isinstance(refused, str)
    assert "--bucket much is not a valid number" in refused


def test_a_plan_is_bytes_of_the_models_that_are_there() -> None:
    """Under fsdp on 4 ranks a quarter of 16 bytes a parameter; bf16 models have 12."""
    model = PreparedModel("net", 1_000_000, 4_000_000)
    short = PreparedModel("half", 1_000_000, 2_000_000)
    fsdp, ddp = choose("fsdp", {}, 4), choose("ddp", {}, 4)

    assert describe_held(fsdp, [model]).startswith("each rank holds 4.0 MB between steps")
    assert describe_held(ddp, [model, short]).startswith("each rank holds 28.0 MB between steps")
    assert "between steps, now 16.0 MB: " in describe_held(fsdp, [model], ddp)
    assert "now" not in describe_held(fsdp, [model], fsdp)
    assert "8 B per parameter" not in describe_held(ddp, [])
    assert f"16 B per parameter (p + g + o; {RECIPES['fp32'].name})" in describe_held(ddp, [])
