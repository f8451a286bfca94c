"""The options of `pytest --nbdist`, which runs notebooks with nbval and nbdist's settings.

Every run of pytest loads this module where nbdist is installed: it imports nothing but pytest,
and without --nbdist it does nothing.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer --nbdist, --nbdist-ranks and --nbdist-gpus."""
    group = parser.getgroup("nbdist", "notebooks with distributed cells")
    group.addoption(
        "--nbdist",
        action="store_true",
        help="run notebooks with nbval, and say which rank printed something else than is stored",
    )
    group.addoption(
        "--nbdist-ranks",
        type=int,
        metavar="N",
        help="ranks for each %%dist_init that has no -n (NBDIST_RANKS)",
    )
    group.addoption(
        "--nbdist-gpus",
        metavar="IDS",
        help="GPUs such as 0,1, or none, for each %%dist_init that has no --gpus (NBDIST_GPUS)",
    )


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Put nbval's options before the typed ones, which win."""
    typed = early_config.known_args_namespace
    if typed.nbdist:
        if not hasattr(typed, "nbval"):
            raise pytest.UsageError("--nbdist needs nbval: pip install nbval")
        from nbdist.testing import notebooks

        args[:0] = notebooks.nbval_options(typed)
    elif typed.nbdist_ranks is not None or typed.nbdist_gpus is not None:
        raise pytest.UsageError("--nbdist-ranks and --nbdist-gpus are for --nbdist: add it")


def pytest_configure(config: pytest.Config) -> None:
    """Let nbdist's notebooks take the place of nbval's."""
    if config.option.nbdist:
        from nbdist.testing import notebooks

        config.pluginmanager.register(notebooks, "nbdist-notebooks")
