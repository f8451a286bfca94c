"""What texts of `TorchRanks` begin with that train the model of tests.programs."""

import importlib.util
import textwrap
from pathlib import Path

import pytest

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="deepspeed is not installed (the extra `deepspeed`)"
)

_PROGRAM = Path(__file__).parents[1] / "programs" / "training.py"
MODEL = textwrap.indent(_PROGRAM.read_text(), "    ")
