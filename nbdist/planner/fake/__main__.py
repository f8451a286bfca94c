"""A process beside the notebook that has torch and no ranks: python -m nbdist.planner.fake.

It reads what is asked from stdin, answers on stdout, and ends when stdin does: with the notebook,
however that ends.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import warnings
from typing import Any

from nbdist.planner import fake_protocol


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    warnings.simplefilter("ignore")
    from nbdist.planner.fake import process_group, run

    process_group.stand_in()
    source: Any = None
    while True:
        number, request = requests.get()
        source = request.source or source
        answer = fake_protocol.pack(run.answer(request, source))
        message = json.dumps({"event": "answer", "id": number, "value": answer})
        answers.write(f"{fake_protocol.MARK}{message}\n")
        answers.flush()


def _listen(requests: queue.Queue[Any]) -> None:
    """Pass on what comes; without the notebook there is nobody to answer, even amid a run."""
    try:
        for line in sys.stdin:
            message = json.loads(line)
            requests.put((message["id"], fake_protocol.unpack(message["request"])))
    finally:  # after half of a line as well
        os._exit(0)


if __name__ == "__main__":
    main()
