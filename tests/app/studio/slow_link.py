"""A link to a server with latency: what is sent arrives later, in order, in both directions."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass
class Link:
    """port: of this machine; seconds: a round trip, which may be changed at any time."""

    port: int
    seconds: float = 0.0


@contextmanager
def slow_link(port: int) -> Iterator[Link]:
    """A link to another port of this machine, without latency until one is set."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    link = Link(int(listening.getsockname()[1]))
    ends: list[socket.socket] = [listening]
    threads: list[threading.Thread] = []

    def run(work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        threads.append(thread)
        thread.start()

    def take(source: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + link.seconds / 2, data))

    def give(target: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with suppress(OSError):
                if not data:
                    target.shutdown(socket.SHUT_WR)
                target.sendall(data)
            if not data:
                return

    def accept() -> None:
        while True:
            try:
                here, _ = listening.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", port))
            except OSError:
                with suppress(OSError):
                    here.shutdown(socket.SHUT_RDWR)  # a server that is forked meanwhile holds it too
                here.close()
                continue
            ends.extend((here, there))
            for source, target in ((here, there), (there, here)):
                waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
                run(take, source, waiting)
                run(give, target, waiting)

    run(accept)
    try:
        yield link
    finally:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in [*threads]:
            thread.join(10)
        for end in ends:
            end.close()
