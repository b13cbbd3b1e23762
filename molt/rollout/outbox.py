"""Finished rollouts of one worker on their way into the log: those that end close together travel in one message.

append(rollout) --first--> a message opens, closes GATHER_S later --> encoded, checked, sent --> acknowledged: all of its rollouts return
                --others in that time--^
A message with a row that breaks a rule is taken apart, so that only the rollout with that row fails. Images are large and shared: a
payload that this worker has brought into the log is not sent again, and only so many bytes of them travel at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from molt.errors import DataError
from molt.log.producer import Producer
from molt.log.rows import Event, Payload, Segment

GATHER_S = 0.025
"""How long a message waits for others: encoding and checking take 5 ms for one rollout as for twenty."""
MOST_BYTES = 64 << 20
"""Payloads that travel at once, a larger message alone."""
KNOWN = 1 << 16
"""Names of payloads that are remembered as being in the log."""


@dataclass(slots=True, kw_only=True, eq=False)
class Parcel:
    """One rollout."""

    segments: Sequence[Segment]
    payloads: Sequence[Payload]
    events: Sequence[Event]


@dataclass(slots=True, kw_only=True)
class OpenMessage:
    """Rollouts that travel together, and the task that sends them."""

    parcels: list[Parcel] = field(default_factory=list)
    sending: asyncio.Task[dict[int, DataError]] | None = None
    """Its result: errors by place among the parcels."""


class Outbox:
    """The way of a worker's rollouts into the log."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._open: OpenMessage | None = None
        self._known: dict[str, None] = {}
        """Payloads that the log has, by name, the oldest first."""
        self._num_bytes = 0
        self._room = asyncio.Condition()

    async def append(self, segments: Sequence[Segment], payloads: Sequence[Payload], events: Sequence[Event] = ()) -> None:
        """Append one rollout whole; it is durable on return. DataError when a row of its own breaks a rule."""
        if self._open is None:
            self._open = OpenMessage()
            self._open.sending = asyncio.create_task(self._send(self._open))
        message = self._open
        place = len(message.parcels)
        message.parcels.append(Parcel(segments=segments, payloads=payloads, events=events))
        assert message.sending is not None, "an open message has its task"
        errors = await asyncio.shield(message.sending)
        if place in errors:
            raise errors[place]

    async def _send(self, message: OpenMessage) -> dict[int, DataError]:
        await asyncio.sleep(GATHER_S)
        self._open = None
        try:
            await self._append(message.parcels)
            return {}
        except DataError as error:
            if len(message.parcels) == 1:
                return {0: error}
        errors: dict[int, DataError] = {}
        for place, parcel in enumerate(message.parcels):
            try:
                await self._append([parcel])
            except DataError as error:
                errors[place] = error
        return errors

    async def _append(self, parcels: Sequence[Parcel]) -> None:
        named = {payload.payload_digest: payload for parcel in parcels for payload in parcel.payloads}
        new = [payload for name, payload in named.items() if name not in self._known]
        size = sum(payload.size_bytes for payload in new)
        async with self._room:
            await self._room.wait_for(lambda: not self._num_bytes or not size or self._num_bytes + size <= MOST_BYTES)
            self._num_bytes += size
        try:
            await self._producer.append(
                segments=[segment for parcel in parcels for segment in parcel.segments],
                payloads=new,
                events=[fact for parcel in parcels for fact in parcel.events],
            )
        finally:
            async with self._room:
                self._num_bytes -= size
                self._room.notify_all()
        self._known |= dict.fromkeys(named)
        while len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
