"""Holds what surrounds the code: dependencies, wheel, commands, changelog, notebook settings."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nbdist.core.versions import VERSION
from nbdist.diagnostics import checks

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

# PyPI's name -> conda-forge's, where they differ.
CONDA_NAMES = {
    "build": "python-build",
    "jupyter-client": "jupyter_client",
    "matplotlib": "matplotlib-base",
    "ml-dtypes": "ml_dtypes",
    "playwright": "playwright-python",
    "torch": "pytorch",
}
WHEEL_FILES = {
    "nbdist/__init__.py",
    "nbdist/nbval_sanitize.cfg",
    *(f"nbdist/profiles/{name}/ipcluster_config.py" for name in ("kubernetes", "local", "mpi")),
    "nbdist/memory/view/memory.js",
    "nbdist/memory/view/memory_data.js",
    "nbdist/trace/view/timeline.js",
    "nbdist/recording/view/viewer.html",
    "nbdist/recording/view/viewer.js",
}


def bounds(*extras: str) -> dict[str, str]:
    """Name -> version bound of the project's dependencies and of these extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return {r.name: str(r.specifier) for r in map(Requirement, lines)}


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """The output of a command; the test fails with what it said if it failed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder))
    (path,) = folder.glob("*.whl")
    return path


def test_conda_environment_equals_pyproject() -> None:
    """environment.yml names the packages and bounds of pyproject, with its extras test and lab."""
    listed = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    conda = dict(line.split(" ") for line in listed if isinstance(line, str))
    expected = {CONDA_NAMES.get(name, name): spec for name, spec in bounds("test", "lab").items()}

    assert conda == {"python": PROJECT["requires-python"], **expected}
    assert [line for line in listed if not isinstance(line, str)] == [{"pip": ["-e ."]}]


def test_every_dependency_is_pinned_within_its_bound() -> None:
    """constraints.txt pins each direct dependency to a version that pyproject allows."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in pins}
    wanted = bounds("test", "lab")
    wanted.pop("pip")  # comes with Python

    assert all(str(r.specifier).startswith("==") for r in pins)
    assert wanted.keys() <= versions.keys()
    assert not [
        n for n, spec in wanted.items() if versions[n] not in Requirement(n + spec).specifier
    ]


def test_the_doctor_asks_for_the_same_versions() -> None:
    """What %dist_doctor takes for too old is what pyproject takes for too old."""
    assert {name: f">={oldest}" for name, oldest in checks.OLDEST.items()} == bounds()
    assert f">={checks.OLDEST_PYTHON}" == PROJECT["requires-python"]


def test_the_command_line_is_installed() -> None:
    """`nbdist` is a script, `--nbdist` an option of pytest, and a launcher of ipyparallel's."""
    assert PROJECT["scripts"] == {"nbdist": "nbdist.frontend.cli:main"}
    launcher = "nbdist.cluster.kernel.launcher:ForkedEngineSetLauncher"
    assert PROJECT["entry-points"] == {
        "pytest11": {"nbdist": "nbdist.testing.plugin"},
        "ipyparallel.engine_launchers": {"nbdist": launcher},
    }


def test_wheel_has_the_shipped_files(wheel: Path) -> None:
    """The wheel holds the profiles, the nbval settings and the licence, and no tests."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    [entry_points] = [name for name in names if name.endswith("/entry_points.txt")]

    assert names >= WHEEL_FILES
    assert b"[ipyparallel.engine_launchers]\nnbdist = " in archive.read(entry_points)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"nbdist"}


@pytest.mark.slow
def test_installed_wheel_starts_ranks(wheel: Path, tmp_path: Path) -> None:
    """nbdist from an unpacked wheel starts a rank, which runs the same, and stops it again."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import nbdist\n"
        "session = nbdist.start(1)\n"
        "result = session.run('import nbdist; print(nbdist.__file__)')\n"
        "session.stop()\n"
        "print(result[0].text)"
    )
    # Away from any checkout.
    apart = {"PYTHONPATH": str(site), "IPYTHONDIR": str(tmp_path / "ipython")}
    apart["NBDIST_PRELOAD"] = "0"
    printed = run(sys.executable, "-c", program, cwd=tmp_path, env=apart)

    assert str(site / "nbdist" / "__init__.py") in printed.splitlines()


def test_readme_commands_exist() -> None:
    """Each `make` command that README shows is a target, and the two main ones are shown."""
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"(?:^|`)[ \t]*(?:\$ )?make ([a-z]+)", readme, re.MULTILINE))

    assert {"demo", "test"} <= shown <= targets


@pytest.mark.parametrize("target", ["demo", "lab"])
def test_what_is_installed_is_said_before_it_is(target: str, tmp_path: Path) -> None:
    """With its size and time: pip says nothing for minutes."""
    command = ["make", "-n", "-f", str(ROOT / "Makefile"), f"VENV={tmp_path / 'none'}", target]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    before_all, _, _ = plan.partition("-m venv ")
    steps = re.split("pip .*install ", plan)[:-1]

    assert re.search(r"echo .*GB and .* minutes", before_all)
    assert all("echo " in step for step in steps)
    assert len(steps) == {"demo": 2, "lab": 3}[target]


def test_the_package_knows_its_version() -> None:
    """What `nbdist version` prints is what is installed."""
    assert PROJECT["version"] == VERSION


def test_changelog_has_this_version() -> None:
    """The changelog has a section for the version being worked on or released."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)

    assert {"Unreleased", PROJECT["version"]} & set(sections)


def test_the_page_has_the_gpu_workflow_and_its_targets_exist() -> None:
    """docs/testing.md shows .github/workflows/gpu.yml as it is; what it makes can be made."""
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    commands = [step.get("run", "") for step in yaml.safe_load(text)["jobs"]["notebooks"]["steps"]]
    targets = [command.split()[1] for command in commands if command.startswith("make ")]

    assert f"```yaml\n{text}```\n" in page
    assert targets == ["notebooks"]


@pytest.mark.parametrize(("typed", "gpus"), [([], "hidden"), (["GPU=1"], "0,1")])
def test_notebooks_see_gpus_where_that_is_asked_for(
    typed: list[str], gpus: str, tmp_path: Path
) -> None:
    """`make notebooks` hides them, `make notebooks GPU=1` leaves what is visible as it is."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "installed"):
        (tmp_path / name).touch()
    program = "PY=echo sees $${CUDA_VISIBLE_DEVICES:-hidden} #"
    command = ["make", "-s", "INSTALLED=installed", program, "notebooks", *typed]
    said = run(*command, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": "0,1"})

    assert said.splitlines()[-1] == f"sees {gpus}"


def test_ci_run_is_executable() -> None:
    """The CI's entry can be started as it is."""
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_tracked_files_hold_no_private_paths() -> None:
    """No file in git names somebody's home folder or holds a private key."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    home = r"(?<![\w.~-])/(?:root|home|Users)/(?=\w)"
    private = re.compile(rf"{home}|[A-Z]:\\+Users\\|BEGIN [A-Z ]*PRIVATE KEY".encode())
    tracked = [ROOT / name for name in listing.stdout.split("\0") if name]

    assert not [
        str(path)
        for path in tracked
        if path.is_file() and path != Path(__file__) and private.search(path.read_bytes())
    ]


def sanitize_patterns(settings: str) -> dict[str, str]:
    """What nbval reads of its settings, imported where it is needed: that takes two seconds."""
    from nbval.plugin import get_sanitize_patterns

    return dict(get_sanitize_patterns(settings))


def sanitized(text: str) -> str:
    """The text as nbval compares it."""
    settings = (ROOT / "nbdist" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    for pattern, replacement in sanitize_patterns(settings).items():
        text = re.sub(pattern, replacement, text)
    return text


def test_nbval_reads_every_pair() -> None:
    """Each section of the nbval settings has one pair, in the form that nbval finds."""
    text = (ROOT / "nbdist" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    sections = re.findall(r"^\[.+\]$", text, re.MULTILINE)

    assert len(sanitize_patterns(text)) == len(sections) == text.count("\nregex: ")


@pytest.mark.parametrize(
    ("once", "again"),
    [
        ("\x1b[0;31mNameError\x1b[0m", "NameError"),
        ("<object at 0x7f2a10bb3c40>", "<object at 0x10a0f2b50>"),
        ("pid 4711 ended", "pid 12 ended"),
        ("{'pid': 4711}", "{'pid': 12}"),
        ("at line 7 of cell [12]: x()", "at line 7 of cell [1]: x()"),
        ("saved /tmp/tmpx1_2/m.pt", "saved /private/tmp/q/m.pt"),
        ("saved '/var/folders/ab/T/x'", "saved '/tmp/y'"),
        ("box in /dev/shm/nbdist-1", "box in /run/user/1000/nbdist-2"),
        ("at tcp://127.0.0.1:40123", "at tcp://127.0.0.1:51999"),
        ("listening on port 40123", "listening on port 8888"),
        ("2026-01-02 03:04:05,678 ready", "2027-11-12T13:14:15Z ready"),
        ("took 0:00:12.5", "took 1:02:03"),
        ("Wall time: 12 ms", "Wall time: 1.2 s"),
        ("1.2 ms +- 3 us per loop (mean of 7)", "9 ns +- 1 ns per loop (mean of 9)"),
        ("5/5 [00:01<00:00,  4.2it/s]", "5/5 [00:09<?, ?it/s]"),
        ("step 3: 1,234.5 samples/s", "step 3: 99 samples/s"),
        ("done in 0.31 s", "done in 12.04 s"),
    ],
)
def test_unstable_text_compares_equal(once: str, again: str) -> None:
    """What differs between two runs of the same cell is equal after nbval's settings."""
    assert sanitized(once) == sanitized(again)


@pytest.mark.parametrize(
    "result",
    [
        "[0-3] loss 2.31",
        "loss below 3.0: True",
        "rank 1 of 2, process 0",
        "tensor([0.5000, 0.2500])",
        "shape (8, 128), 3 steps, 10 s timeout",
        "flags 0x1f, ratio 16:9, 50%",
        "parameters: 1,234,567",
    ],
)
def test_results_stay_comparable(result: str) -> None:
    """What a cell claims is left as it is by nbval's settings."""
    assert sanitized(result) == result
