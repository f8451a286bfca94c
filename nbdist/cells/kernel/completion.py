"""Names on ranks, for Tab, Shift-Tab and hints: asked within a second, busy or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TypeVar
from weakref import WeakKeyDictionary

from nbdist.cells.completion import Reply, inspect_reply, path_around, path_before, reply_of
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.rpc.kernel.functions import RankFunction

T = TypeVar("T")

# A frontend shows nothing meanwhile, and the kernel's loop goes on. A user who types on waits
# less long than one who has asked what a name is.
COMPLETE_S = 0.6
INSPECT_S = 2.0

# The names that a rank had when it was last asked, with their types.
_last_names: WeakKeyDictionary[Ranks, dict[int, dict[str, str]]] = WeakKeyDictionary()

complete_there: RankFunction[[str, int], tuple[Reply, dict[str, str]]] = RankFunction(
    "nbdist.engine.completion:complete"
)
inspect_there: RankFunction[[str, int, int], Reply] = RankFunction(
    "nbdist.engine.completion:inspection"
)
attributes: RankFunction[[tuple[str, ...]], dict[str, str]] = RankFunction("attributes")
glance: RankFunction[[tuple[str, ...]], Reply] = RankFunction("glance")


async def complete(ranks: Ranks, rank: int, code: str, cursor: int) -> Reply:
    """A complete_reply with a rank's names.

    An idle rank is asked as a kernel is. One that runs a cell is looked at by its control
    thread, which runs nothing of the user's. One that does not answer by then (its C code holds
    the interpreter, it is stopped or dead) had the names of the last time.
    """
    if _is_free(ranks, rank):
        answer = await _within(COMPLETE_S, lambda: complete_there(ranks.call, rank, code, cursor))
        if answer is not None:
            reply, rank_names = answer
            _last_names.setdefault(ranks, {})[rank] = rank_names
            return reply
    *path, _ = path_before(code, cursor)
    names = await _within(
        COMPLETE_S,
        lambda: ranks.ask(lambda ask, asked_rank: attributes(ask, asked_rank, tuple(path)), rank),
    )
    if names is not None and not path:
        _last_names.setdefault(ranks, {})[rank] = names
    if names is None:
        names = {} if path else _last_names.get(ranks, {}).get(rank, {})
    return reply_of(names, code, cursor)


async def inspect(ranks: Ranks, rank: int, code: str, cursor: int, detail: int) -> Reply:
    """An inspect_reply of a rank; where it runs a cell, without the value.

    To show a value can wait for a GPU, or for other ranks.
    """
    if _is_free(ranks, rank):
        reply = await _within(
            INSPECT_S, lambda: inspect_there(ranks.call, rank, code, cursor, detail)
        )
        if reply is not None:
            return reply
    path = path_around(code, cursor)
    if not all(path):
        return inspect_reply("")
    reply = await _within(
        COMPLETE_S, lambda: ranks.ask(lambda ask, asked_rank: glance(ask, asked_rank, path), rank)
    )
    if reply is None:
        return inspect_reply(f"Rank {rank} is not answering.")
    if reply["found"]:
        reply["data"]["text/plain"] += f"\n\nRank {rank} is busy: no value is shown."
    return reply


def types_on_ranks(ranks: Ranks, name: str) -> dict[int, str]:
    """The type of a variable on the ranks that have it, as far as they answer in time."""
    asked = ranks.ask_all(lambda ask, rank: glance(ask, rank, (name,)))
    answered, _ = wait_for(asked.values(), COMPLETE_S)
    replies = {rank: f.result() for rank, f in asked.items() if f in answered and not f.exception()}
    return {
        rank: str(reply["data"]["text/plain"]).split("\n")[0].removeprefix("Type: ")
        for rank, reply in replies.items()
        if reply["found"]
    }


def _is_free(ranks: Ranks, rank: int) -> bool:
    return ranks.is_connected(rank) and rank not in ranks.busy_ranks


async def _within(deadline_s: float, ask: Callable[[], Future[T] | None]) -> T | None:
    """The answer; None where there is none by the deadline, or asking has failed."""
    try:
        future = ask()
        if future is None:
            return None
        answer = asyncio.wrap_future(future)
        # A late error is read here: no caller waits for it, and asyncio would log it.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Not wait_for: it would cancel the future, which is the channel's to settle.
        await asyncio.wait({answer}, timeout=deadline_s)
        return answer.result() if answer.done() else None
    except Exception:  # noqa: BLE001  # Tab has no place for an error: then there is less to offer
        return None
