"""A process beside the notebook that counts steps of training with fake tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from nbdist.cluster.kernel.launchers.helper_process import HelperProcess
from nbdist.errors import NbdistError, OptionError
from nbdist.planner import fake_protocol
from nbdist.planner.fake_protocol import FakeAnswer, FakeRequest, Source
from nbdist.planner.memory import Memory, memory_of
from nbdist.planner.models import ModelShape
from nbdist.planner.plan import Engine
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy, described

# 70 billion parameters on 64 ranks take about a minute.
RUN_S = 300.0
_LAST = 300  # characters of what the process has written before it ended


class _FakeProcess(HelperProcess):
    def __init__(self) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        super().__init__("fake", [sys.executable, "-m", "nbdist.planner.fake"], environment)

    def _take_end(self) -> None:
        code = f"exit code {self._process.wait()}"
        last = self.words()[-_LAST:].rpartition("\n")[2]
        self._lose(f"the process of the fake run ended ({', '.join(filter(None, [code, last]))})")


class FakeEngine:
    """A count of memory for planner.plan.plan by a run with fake tensors; a context manager.

    The process is started by the first case, and ends when its standard input does: with this
    object, or with the notebook, however that ends.
    """

    def __init__(
        self,
        source: Source,
        *,
        otherwise: Engine = memory_of,
        problem: str = "",
        limit_s: float = RUN_S,
        progress: Callable[[str], None] = lambda _text: None,
    ):
        """Take one model; nothing runs yet. `otherwise` counts what cannot be run.

        After `limit_s` for one case it counts all that are left, as it does where a problem says
        why there is no source.
        """
        self._source: Source | None = source
        self._otherwise = otherwise
        self._limit_s = limit_s
        self._progress = progress
        self._process: _FakeProcess | None = None
        self._ended = problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, model: ModelShape, choice: Strategy, load: Workload) -> Memory:
        """The memory of the rank that needs most; by formulas, with a note, where there is no run.

        Raises:
            OptionError: The strategy does not go with the model.
        """
        answer = self._ask(FakeRequest(self._source, choice, load))
        if answer.refused:
            raise OptionError(answer.refused)
        if answer.memory is None or answer.memory.is_partial:
            return complete(self._otherwise(model, choice, load), answer, model)
        return of_count(model, choice, load, answer.memory) if model.is_assumed else answer.memory

    def close(self) -> None:
        """End the process. Twice is harmless."""
        if self._process is not None:
            self._process.kill()
        self._process = None

    def _ask(self, request: FakeRequest) -> FakeAnswer:
        if self._ended:
            return FakeAnswer(problem=self._ended)
        self._progress(described(request.choice))
        try:
            asked = self._start().ask("run", request=fake_protocol.pack(request))
            self._source = None
            text = asked.result(self._limit_s)
        except TimeoutError:
            self._ended = f"the process of the fake run did not answer within {self._limit_s:.0f} s"
        except (NbdistError, OSError) as error:
            self._ended = str(error)
        except BaseException:  # interrupted: what it answers later belongs to nothing
            self.close()
            raise
        else:
            answer: FakeAnswer = fake_protocol.unpack(text)
            return answer
        self.close()
        return FakeAnswer(problem=self._ended)

    def _start(self) -> _FakeProcess:
        self._process = self._process or _FakeProcess()
        return self._process


def complete(estimate: Memory, answer: FakeAnswer, model: ModelShape) -> Memory:
    """Formulas' activations and buffers, with the states of a run that could not make its step."""
    counted = answer.memory
    if counted is not None and not model.is_assumed:
        estimate = _with_states(estimate, counted)
    return replace(estimate, note=answer.problem)


def of_count(model: ModelShape, choice: Strategy, load: Workload, run: Memory) -> Memory:
    """A run's activations with the states of the number that was typed.

    The shape that is assumed for 7e9 parameters has somewhat more or fewer.
    """
    states = memory_of(model, choice, load)
    most = run.most + states.parameters - run.parameters
    return replace(_with_states(run, states), most=most)


def _with_states(memory: Memory, other: Memory) -> Memory:
    """Add the states between steps, and the optimizer's step, as the other count has them."""
    what = ("parameters", "gradients", "optimizer", "step")
    return replace(memory, **{name: getattr(other, name) for name in what})
