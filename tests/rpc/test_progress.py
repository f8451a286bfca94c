"""How far a rank is, as its main thread reports it."""

from nbdist.rpc.rank import progress


def newest() -> str:
    return str(progress.newest())


def test_what_is_inside_reports_as_its_own_and_ends() -> None:
    """The outer one goes on where it was."""
    with progress.during("loading"):
        progress.tell("reading", 1, 2, "files")
        with progress.during("switch"):
            progress.tell("moving")
            assert newest() == "switch: moving"
        assert newest() == "loading: reading 1 of 2 files, 50%"
    assert progress.newest() is None


def test_what_reports_for_all_of_it_hides_what_is_inside() -> None:
    """Of a verification nobody wants to read that it switches."""
    with progress.during("verify", is_whole=True):
        progress.tell("the reference")
        with progress.during("switch"):
            progress.tell("committing")
            with progress.during("loading"):
                progress.tell("reading")
            assert newest() == "verify: the reference"
        progress.tell("the reference once more")
        assert newest() == "verify: the reference once more"
    with progress.during("switch"):
        progress.tell("committing")
        assert newest() == "switch: committing"
