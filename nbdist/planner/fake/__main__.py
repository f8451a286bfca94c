"""A process beside the notebook that has torch and no ranks: python -m nbdist.planner.fake.

It reads what is asked from stdin, answers on stdout, and ends when stdin does: with the notebook,
however that ends.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import warnings
from typing import Any

from nbdist.planner import fake_protocol


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    warnings.simplefilter("ignore")
    from nbdist.planner.fake import process_group, run

    process_group.stand_in()
    source: Any = None
    while True:
        request = requests.get()
        source = request.source or source
        fake_protocol.write(answers, run.answer(request, source))


def _listen(requests: queue.Queue[Any]) -> None:
    """Pass on what comes; without the notebook there is nobody to answer, even amid a run."""
    while (request := fake_protocol.read(sys.stdin.buffer)) is not None:
        requests.put(request)
    os._exit(0)


if __name__ == "__main__":
    main()
