"""One file for all messages whose coroutines wait at the same time."""

import asyncio

from writer import write


class Group:
    def __init__(self):
        self.rows, self.written = [], None

    async def add(self, row):
        """Returns once the row's file is durable."""
        self.rows.append(row)
        if self.written is None:
            self.written = asyncio.ensure_future(self.flush())
        await asyncio.shield(self.written)

    async def flush(self):
        await asyncio.sleep(0.1)
        rows, self.rows, self.written = self.rows, [], None
        await asyncio.to_thread(write, rows)
