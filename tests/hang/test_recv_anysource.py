"""A receive from whichever rank sends first ends by an abort, though Gloo has no socket for it."""

from pathlib import Path

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs /proc"),
]

# Rank 0 receives from nobody in each way, is aborted, and both recover.
ABORTED = """
    pair = dist.new_group([0, 1])
    old = torch.zeros(3)
    issued = dist.irecv(torch.zeros(3), tag=9) if rank == 0 else None
    waits = {
        "recv": lambda: dist.recv(old),
        "irecv": lambda: dist.irecv(old, tag=3).wait(),
        "in a group": lambda: dist.recv(old, group=pair),
    }
    errors, right = {}, []
    for generation, (kind, wait) in enumerate(waits.items(), 1):
        if rank == 0:
            errors[kind] = broken_off(wait)[0]
            say(f"out{generation}")
        else:
            wait_for(f"out{generation}", [0])
        process_groups.recover(generation)
        fresh, source = torch.full((3,), float(rank)), []
        if rank == 1:
            dist.send(fresh, 0)
            dist.send(fresh, 0, tag=3)
        else:
            source.append(dist.recv(fresh))
            work = dist.irecv(fresh, tag=3)
            source += [work.wait(), work._source_rank()]
        right.append([total(), fresh.tolist(), source])
    if rank == 0:
        errors["issued before"] = refusal(issued.wait, RuntimeError)
    done(errors=errors, right=right, old=old.tolist())
"""


def test_a_receive_from_any_rank_ends_and_the_next_one_gets_its_own(tmp_path: Path) -> None:
    """recv, irecv, in a group, and one issued long before; the old tensor is not written to."""
    zero, first = run_ranks(tmp_path, 2, ABORTED)

    errors = zero["errors"]
    assert [errors[kind] for kind in ("recv", "irecv", "in a group")] == ["RuntimeError"] * 3
    assert "until the wait was aborted" in errors["issued before"]
    assert zero["right"] == [[3.0, [1.0] * 3, [1, True, 1]]] * 3
    assert first["right"] == [[3.0, [1.0] * 3, []]] * 3
    assert zero["old"] == [0.0] * 3


INTERRUPTED = """
    from datetime import timedelta
    x = torch.zeros(3)
    if rank == 1:
        wait_for("pressed", [0])
        dist.send(torch.ones(3), 0)
        dist.send(torch.full((3,), 2.0), 0)
        done()
    def press():
        wait_asleep()
        signal.raise_signal(signal.SIGINT)
        say("pressed")
    threading.Thread(target=press).start()
    errors = ""
    try:
        dist.recv(x)
    except KeyboardInterrupt:
        errors = "interrupt"
    first = x.tolist()
    source = dist.recv(x)
    late = refusal(lambda: dist.irecv(x, tag=1).wait(timedelta(seconds=0.2)), RuntimeError)
    done(errors=errors, first=first, second=x.tolist(), source=source, late=late)
"""


def test_an_interrupt_comes_at_the_end_and_takes_no_message_away(tmp_path: Path) -> None:
    """As in C++: what was received is there, the next receive gets the next message."""
    zero = run_ranks(tmp_path, 2, INTERRUPTED)[0]

    assert zero["errors"] == "interrupt"
    assert zero["first"] == [1.0] * 3
    assert (zero["second"], zero["source"]) == ([2.0] * 3, 1)
    assert "Timed out waiting 200ms" in zero["late"]
