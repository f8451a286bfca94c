"""Samples of what ranks use and do, taken in a thread of the kernel, without the process group.

What a rank of this host does is read, not asked for: its call log, /proc, the driver. So it is
sampled while it waits in a collective, and while its C code holds the GIL. Ranks on other hosts
answer through their control threads, and torch's allocator is asked there: those numbers have an
age.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nbdist.cluster.kernel import run_dir
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.finding import Finding
from nbdist.errors import NotRunning, OptionError
from nbdist.hang.kernel.health import Health
from nbdist.monitor import findings as monitor_findings
from nbdist.monitor.kernel.metrics_server import Exporter
from nbdist.monitor.kernel.sampler import PERIOD_S, Sampler, Samples
from nbdist.monitor.prometheus import exposition
from nbdist.monitor.samples import SampleHistory

# Idle ranks of whom nobody wants to know anything for this long are sampled no more.
UNASKED_S = 600.0
END_S = 3.0
# The first sample takes tens of milliseconds.
FIRST_S = 5.0
MOST_PROBLEMS = 20

Listener = Callable[[Samples], None]


class Monitor:
    """The one sampler of a session, however many look at it.

    Attributes:
        history: All that was sampled since the session began.
    """

    def __init__(self, ranks: Ranks, health: Health, period_s: float = PERIOD_S):
        """Sample nothing yet: the first who asks begins."""
        self.history = SampleHistory()
        self._ranks = ranks
        self._health = health
        self._period_s = period_s
        self._latest: Samples = ()
        self._listeners: list[Listener] = []
        self._problems: dict[str, None] = {}
        self._asked_s = 0.0
        self._new = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._exporter: Exporter | None = None
        self._sampler = Sampler(ranks, health, self._note, period_s)

    @property
    def is_running(self) -> bool:
        """Whether samples are taken now."""
        return self._thread is not None

    @property
    def problems(self) -> tuple[str, ...]:
        """Errors in reading samples, and exceptions of listeners: each once."""
        return tuple(self._problems)

    def start(self) -> None:
        """Sample from now on; harmless if it is done already, and after the ranks were stopped."""
        with self._new:
            self._asked_s = time.monotonic()
            if self._thread is not None or self._is_closed:
                return
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="nbdist-monitor", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Sample no more, and serve nothing; the history stays. Who asks next begins again."""
        with self._new:
            thread, self._thread = self._thread, None
            self._stop.set()
            self._new.notify_all()
        self._close_exporter()
        if thread is not None and thread is not threading.current_thread():
            thread.join(END_S)
        self._sampler.close()

    def close(self) -> None:
        """The same for good. Twice is harmless."""
        self._is_closed = True
        self.stop()
        self._listeners.clear()

    def latest(self) -> Samples:
        """The newest sample of every rank, in rank order; empty before the first. It never waits.

        Whoever asks keeps the sampling going.
        """
        self.start()
        return self._latest

    def wait(self, after_s: float, deadline_s: float) -> Samples:
        """The first samples after a moment of the monotonic clock; those there are at the deadline.

        So long it waits at most.
        """
        end_s = time.monotonic() + deadline_s
        self.start()
        with self._new:
            while self.is_running and not (self._latest and self._latest[0].time_s > after_s):
                # In pieces: an interrupt of the notebook is noticed between two of them.
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                self._new.wait(min(left_s, self._period_s))
        return self._latest

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call a function with each new set of samples, in the sampling thread, until told not to.

        Sampling goes on for as long as anybody listens. What the function raises is kept in
        `problems`, and it is called again.

        Returns:
            A function that ends this; twice is harmless.
        """
        self._listeners.append(listener)
        self.start()

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def serve(self, port: int) -> Exporter:
        """Serve the newest samples to Prometheus until `stop`; sampling goes on meanwhile.

        Args:
            port: On 127.0.0.1; 0 for any that is free, or the one that is served already.

        Raises:
            NotRunning: After the ranks were stopped.
            OptionError: If the port cannot be had, or another one is served already.
        """
        if self._is_closed or self._ranks.is_stopped:
            raise NotRunning(f"There are no ranks to report on. {run_dir.WHAT_NOW}")
        served = self._exporter
        if served is not None and port not in {0, served.port}:
            raise OptionError(
                f"{served.url} is already being served. %dist_monitor --off ends that; then choose "
                f"port {port}."
            )
        if served is None:
            places = self._ranks.topology.ranks
            served = self._exporter = Exporter(
                lambda: exposition(self._latest or self.wait(0.0, FIRST_S), places),
                port,
                self._ranks.cluster.run_dir,
            )
        self.start()
        return served

    def findings(self, *, is_past: bool = False) -> tuple[Finding, ...]:
        """Findings in the newest samples and those just before; see monitor.findings."""
        return monitor_findings.findings(self.history, self._latest, is_past=is_past)

    def _close_exporter(self) -> None:
        with self._new:
            exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def _note(self, problem: str) -> None:
        if problem not in self._problems and len(self._problems) < MOST_PROBLEMS:
            self._problems[problem] = None

    def _run(self, stop: threading.Event) -> None:
        next_s = time.monotonic()
        while not self._ends(stop):
            try:
                samples = self._sampler.take()
            except Exception as error:  # noqa: BLE001  # told; the next sample may be well
                self._note(f"a sample failed: {type(error).__name__}: {error}")
            else:
                self._publish(samples)
            # A sample that came late is not followed by those that were missed.
            next_s = max(next_s + self._period_s, time.monotonic())
            stop.wait(next_s - time.monotonic())
        if self._ranks.is_stopped:  # maybe from outside, where nobody else ends this
            self._close_exporter()

    def _ends(self, stop: threading.Event) -> bool:
        """Whether this thread is to end; in one step, so that nobody counts on it any more."""
        is_over = stop.is_set() or self._ranks.is_stopped
        is_asked = time.monotonic() < self._asked_s + UNASKED_S
        with self._new:
            is_wanted = self._listeners or self._exporter or self._ranks.busy_ranks or is_asked
            if is_wanted and not is_over:
                return False
            if self._stop is stop:
                self._thread = None
            self._new.notify_all()
        return True

    def _publish(self, samples: Samples) -> None:
        self.history.append(samples)
        with self._new:
            self._latest = samples
            self._new.notify_all()
        for listener in list(self._listeners):
            try:
                listener(samples)
            except Exception as error:  # noqa: BLE001  # a panel's mistake must not end the sampling
                self._note(f"a listener failed: {type(error).__name__}: {error}")
