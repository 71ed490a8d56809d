"""A link to a server with latency: what is sent arrives later, in order, in both directions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def slow_link(port: int, seconds: float) -> Iterator[int]:
    """The port of a link to another port of this machine. seconds: a round trip."""
    loop = asyncio.new_event_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    writer.close()
                    return
                writer.write(data)

        delivering = loop.create_task(deliver())
        try:
            while data := await reader.read(1 << 16):
                waiting.put_nowait((loop.time() + seconds / 2, data))
        except OSError:
            pass
        waiting.put_nowait((loop.time() + seconds / 2, b""))
        await delivering

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)

    async def serve() -> None:
        server = await asyncio.start_server(joined, "127.0.0.1", 0)
        found.append(server.sockets[0].getsockname()[1])
        ready.set()
        await server.serve_forever()

    found: list[int] = []
    ready = threading.Event()

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve())
        except (asyncio.CancelledError, RuntimeError):
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join(5)
