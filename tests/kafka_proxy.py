"""A proxy for a Kafka of the tests, which damages answers.

Clients connect to the address in the answers, so the proxy replaces it by its own: both are
``127.0.0.1`` and a port of four bytes, and no answer changes its length.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable
from typing import Any, Self

__all__ = ["FETCH", "KafkaProxy"]

#: Kinds of requests, by Kafka's numbers.
FETCH = 1

_HEADER = struct.Struct(">hhi")


class KafkaProxy:
    """Serves from its own thread until the block ends.

    :param bootstrap: The broker: one, at ``127.0.0.1``.
    :param through: The port by which the broker is reached, if not its own.
    :param change: From the kind of a request and its answer to what the client gets, as long.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        through: int | None = None,
        change: Callable[[int, bytes], bytes] | None = None,
    ) -> None:
        self._known_as = int(bootstrap.rpartition(":")[2])
        self._target = through or self._known_as
        self.change = change
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kafka proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def bootstrap(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    def _serve(self) -> None:
        async def listen() -> asyncio.Server:
            return await asyncio.start_server(self._join, "127.0.0.1", 0)

        async def hang_up() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the sockets are closed at the loop's next turn

        loop = self._loop
        server = loop.run_until_complete(listen())
        self.port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        try:
            loop.run_forever()
        finally:
            server.close()
            loop.run_until_complete(hang_up())
            loop.close()

    async def _join(self, client: Any, to_client: asyncio.StreamWriter) -> None:
        broker, to_broker = await asyncio.open_connection("127.0.0.1", self._target)
        kinds: dict[int, int] = {}
        relays = (
            asyncio.ensure_future(self._requests(client, to_broker, kinds)),
            asyncio.ensure_future(self._answers(broker, to_client, kinds)),
        )
        try:
            await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for relay in relays:
                relay.cancel()
            for writer in (to_client, to_broker):
                writer.close()
            await asyncio.gather(*relays, return_exceptions=True)

    async def _requests(
        self, client: asyncio.StreamReader, to_broker: asyncio.StreamWriter, kinds: dict[int, int]
    ) -> None:
        while True:
            frame = await _frame(client)
            kind, _, number = _HEADER.unpack_from(frame)
            kinds[number] = kind
            _write(to_broker, frame)
            await to_broker.drain()

    async def _answers(
        self, broker: asyncio.StreamReader, to_client: asyncio.StreamWriter, kinds: dict[int, int]
    ) -> None:
        address = b"127.0.0.1"
        broker_address = address + struct.pack(">i", self._known_as)
        own_address = address + struct.pack(">i", self.port)
        while True:
            frame = await _frame(broker)
            [number] = struct.unpack_from(">i", frame)
            kind = kinds.pop(number)
            if kind == FETCH:
                frame = frame if self.change is None else self.change(kind, frame)
            else:
                frame = frame.replace(broker_address, own_address)
            _write(to_client, frame)
            await to_client.drain()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    [length] = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(length)


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(struct.pack(">i", len(frame)) + frame)
