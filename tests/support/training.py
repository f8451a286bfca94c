"""What texts of `TorchRanks` begin with that train or save the models of tests.programs."""

import importlib.util
import textwrap
from pathlib import Path

import pytest

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="deepspeed is not installed (the extra `deepspeed`)"
)

_PROGRAMS = Path(__file__).parents[1] / "programs"
MODEL = textwrap.indent((_PROGRAMS / "training.py").read_text(), "    ")
SAVED = textwrap.indent((_PROGRAMS / "saving.py").read_text(), "    ")
