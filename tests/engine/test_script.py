"""A program runs on a rank as the interpreter would run it."""

import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from nbdist.engine import script
from nbdist.errors import ScriptEnded
from nbdist.hang.rank.source_line import UserFrameFinder


@pytest.fixture(autouse=True)
def _own_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["before"])


def run(text: str, *arguments: str, path: str = "/nowhere/train.py") -> dict[str, Any]:
    """The program's variables after its end."""
    names: dict[str, Any] = {"__name__": "__main__", "rank": 3}
    script.take(path, text, arguments)
    script.run(names)
    return names


def test_it_sees_its_arguments_its_path_and_the_names_of_cells() -> None:
    """sys.argv, __file__ and __name__ are a program's, beside what cells have."""
    text = "import sys\nseen = sys.argv[:], __file__, __name__, rank\n"
    names = run(text, "--lr", "0.1")

    path = "/nowhere/train.py"
    assert names["seen"] == ([path, "--lr", "0.1"], path, "__main__", 3)


@pytest.mark.parametrize("code", ["", "0", "None"])
def test_ending_itself_well_is_no_failure(code: str) -> None:
    """sys.exit() and sys.exit(0) end it, and what follows does not run."""
    names = run(f"import sys\nhas_run = True\nsys.exit({code})\nhas_gone_on = True\n")

    assert names["has_run"]
    assert "has_gone_on" not in names


@pytest.mark.parametrize("code", ["3", "'no data'"])
def test_ending_itself_with_another_code_is_one(code: str) -> None:
    """The code, or the text, is in the message."""
    with pytest.raises(ScriptEnded, match=f"exited with code {code.strip(chr(39))}"):
        run(f"import sys\nsys.exit({code})\n")


@pytest.mark.parametrize("name", ["exit", "quit"])
def test_exit_and_quit_end_it_too(name: str) -> None:
    """Though in cells they are refused."""
    names: dict[str, Any] = {"__name__": "__main__", name: None}
    script.take("/nowhere/train.py", f"{name}(4)\n", ())

    with pytest.raises(ScriptEnded, match="exited with code 4"):
        script.run(names)


def test_a_traceback_has_the_programs_lines_where_it_has_no_file() -> None:
    """On another host, or where the file was changed meanwhile, the text that ran is shown."""
    with pytest.raises(ZeroDivisionError) as caught:
        run("a = 1\nb = a / 0\n", path="/nowhere/broken.py")

    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("/nowhere/broken.py", 2)
    assert linecache.getline("/nowhere/broken.py", 2) == "b = a / 0\n"


def test_future_statements_of_nbdist_are_not_the_programs() -> None:
    """It is compiled by itself."""
    names = run("def f(x: int): ...\n")

    assert names["f"].__annotations__ == {"x": int}
    assert "annotations" in Path(script.__file__).read_text()


def test_its_lines_are_the_users_wherever_it_lies() -> None:
    """Also in a package's folder, where what it calls there is not."""
    path = "/nowhere/site-packages/pkg/train.py"
    names = run("import sys\nframe = sys._getframe()\n", path=path)
    place = UserFrameFinder().find(names["frame"])

    assert place is not None
    assert (place.file, place.line) == ("train.py", 2)
