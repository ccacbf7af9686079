"""Waits until live nodes hold all tasks of a model, before anything is paid for it.

A plan whose nodes still have to load would spend its deadline on that. How long loading takes
depends on machines that nobody here knows, so a client waits as long as nodes go on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from splitup.core import tuning
from splitup.core.background import cancel
from splitup.core.errors import SplitUpError, Unavailable
from splitup.messages import api
from splitup.messages.snapshots import ModelHolders
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView

_log = logging.getLogger("splitup.client.holders")


class Patience:
    """Decides from what members see whether to wait on. Times are seconds on any one clock."""

    def __init__(self, model: str, now_s: float) -> None:
        self._model = model
        self._seen: tuple[int, int, int] | None = None
        self._said = ""
        self._changed_s = now_s
        self._busy_s = now_s  # when a node was last seen loading, or a figure changing

    def note(self, found: ModelHolders, now_s: float) -> str:
        """Return what to tell the user, "" for nothing new; raise Unavailable when it is hopeless.

        It is when no live node has loaded a task or begun to for ``HOLDERS_QUIET_S``, and when
        those that say they load have not loaded one for ``LOAD_QUIET_S``.
        """
        seen = (found.tasks, found.held, found.reported)
        is_new, self._seen = seen != self._seen, seen
        if is_new:
            self._changed_s = now_s
        if is_new or found.loading:
            self._busy_s = now_s
        is_over = (
            now_s >= self._busy_s + tuning.HOLDERS_QUIET_S
            or now_s >= self._changed_s + tuning.LOAD_QUIET_S
        )
        if is_over:
            raise Unavailable(
                f"{self._describe(found)}; nothing was paid; see why on the nodes: "
                "splitup-node status"
            )
        if not is_new or (text := self._describe(found)) == self._said:
            return ""
        self._said = text
        return text

    def _describe(self, found: ModelHolders) -> str:
        return describe_holders(found, self._model)


def describe_holders(found: ModelHolders, model: str = "") -> str:
    """Return how far nodes have loaded a model, and what is in the way."""
    if not found.tasks:
        return f"the committee does not know {f'model {model}' if model else 'it'} yet"
    of_model = model and f" of {model}"
    reported = min(found.reported, found.tasks)  # the one member that answers may lie
    if reported == found.tasks:
        waited = "waiting for the chain to list their nodes"
        return f"all {found.tasks} tasks{of_model} are loaded; {waited}"
    text = f"loading {reported} of {found.tasks} tasks{of_model}"
    if found.loading:
        return text
    if not found.live:
        return f"{text}: no node is live"
    if not found.able:
        return f"{text}: none of {found.live} live nodes has memory for another one"
    return f"{text}: none of {found.live} live nodes is loading one"


async def wait_until_held(
    http: SignedClient,
    fetch_committee: Callable[[], Awaitable[CommitteeView]],
    model: str,
    model_id: str,
) -> None:
    """Wait until live nodes of the snapshot on chain hold all tasks of a model, named ``model``.

    What it waits for is logged. Raises Unavailable when no node goes on loading. f + 1 members, of
    whom one is honest, say that the tasks are held; who gives no answer is no obstacle, since the
    request tells more.
    """
    loop = asyncio.get_running_loop()
    patience = Patience(model, loop.time())
    while (found := await ask_all(http, await fetch_committee(), model_id, is_held)) is not None:
        if text := patience.note(found, loop.time()):
            _log.warning("%s", text)
        await asyncio.sleep(tuning.HOLDERS_POLL_S)


async def ask_all(
    http: SignedClient,
    committee: CommitteeView,
    model_id: str,
    is_ready: Callable[[ModelHolders], bool],
) -> ModelHolders | None:
    """Return what at least one honest member sees, None when one says that it ``is_ready``.

    Of members that do not answer nothing is known: that is None, too, when none does.
    """
    tolerated = (len(committee.members) - 1) // 3
    asking = [
        asyncio.create_task(_ask(http, member.endpoint, model_id)) for member in committee.members
    ]
    answers: list[ModelHolders] = []
    ready = 0
    try:
        for answer in asyncio.as_completed(asking):
            found = await answer
            if found is not None and not is_ready(found):
                answers.append(found)
            elif (ready := ready + 1) > tolerated:
                return None
    finally:
        await cancel(*asking)
    return find_believable(answers, tolerated)


def is_held(found: ModelHolders) -> bool:
    """Return whether nodes of the snapshot hold every task."""
    return 0 < found.tasks <= found.held


def is_served(found: ModelHolders) -> bool:
    """Return whether nodes that are live now have loaded every task."""
    return 0 < found.tasks <= found.reported


def find_believable(answers: Sequence[ModelHolders], tolerated: int) -> ModelHolders | None:
    """Return for each figure the largest that an honest member states, too; None for no answer."""
    if not answers:
        return None
    names = ("tasks", "held", "reported", "loading", "able", "live")
    place = min(tolerated, len(answers) - 1)
    figures = {
        name: sorted((getattr(one, name) for one in answers), reverse=True)[place] for name in names
    }
    return answers[0].model_copy(update=figures)


async def _ask(http: SignedClient, endpoint: str, model_id: str) -> ModelHolders | None:
    try:
        url = api.HOLDERS.url(endpoint, model_id=model_id)
        value = await http.get_json(url, max_bytes=api.HOLDERS.max_reply_bytes)
        return ModelHolders.from_value(value)
    except SplitUpError:
        return None
