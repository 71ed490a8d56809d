"""The copy floor: what the machine itself takes to read the inputs and to write as many bytes as the output has.

    python -m benchmarks.floor --read FOLDER... --write OUT --write-bytes N [--read-bytes N] [--threads 2] [--fsync]

Positioned reads and writes through one reused buffer a thread, reads and writes spread evenly over each other, and nothing
else: no header, no arithmetic, no checksum. They are of 256 KiB, which stays in the processor's cache. With --fsync they are
of 4 MiB, and the writes go past the page cache (O_DIRECT), the quickest way to the disk. A merge cannot be faster unless the
file system shares blocks between files. Prints the seconds from the first byte to the last (fsync included when asked for),
so that Python's own start is not part of the floor; whoever is measured against it pays for theirs.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CACHED_BYTES, DIRECT_BYTES = 256 << 10, 4 << 20

Job = tuple[int, int, int, bool]
"""File descriptor, offset, bytes, True for a write."""


def chunks(fd: int, nbytes: int, chunk_bytes: int, write: bool) -> Iterator[Job]:
    """The jobs that cover the first `nbytes` of a file."""
    for offset in range(0, nbytes, chunk_bytes):
        yield fd, offset, min(chunk_bytes, nbytes - offset), write


def interleave(reads: list[Job], writes: list[Job]) -> list[Job]:
    """Writes spread evenly between reads, each list in its own order.

    >>> [w for *_, w in interleave([(0, i, 1, False) for i in range(4)], [(1, i, 1, True) for i in range(2)])]
    [False, True, False, False, True, False]
    """
    keyed = [((i + 0.5) / len(jobs), job) for jobs in (reads, writes) for i, job in enumerate(jobs)]
    return [job for _, job in sorted(keyed, key=lambda pair: (pair[0], pair[1][3]))]


def run(jobs: list[Job], threads: int, chunk_bytes: int) -> None:
    """Do the jobs, in order of their start, with one buffer a thread."""
    queue = iter(jobs)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        buffer = memoryview(mmap.mmap(-1, chunk_bytes))  # whole pages, as O_DIRECT wants them
        while True:
            with lock:
                job = next(queue, None)
            if job is None:
                return
            fd, offset, nbytes, write = job
            done = os.pwrite(fd, buffer[:nbytes], offset) if write else os.preadv(fd, [buffer[:nbytes]], offset)
            if done != nbytes:
                failures.append(OSError(f"{'wrote' if write else 'read'} {done} of {nbytes} bytes at {offset}"))
                return

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def main() -> None:
    """Time one pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, nargs="+", required=True, help="folders of safetensors")
    parser.add_argument("--read-bytes", type=int, help="stop after so many bytes (default: all)")
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--write-bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--processor", action="store_true", help="print processor seconds of all threads instead")
    args = parser.parse_args()

    chunk_bytes = DIRECT_BYTES if args.fsync else CACHED_BYTES
    files = [file for folder in args.read for file in sorted(folder.glob("*.safetensors"))]
    remaining = args.read_bytes if args.read_bytes is not None else sum(file.stat().st_size for file in files)
    reads: list[Job] = []
    for file in files:
        nbytes = min(remaining, file.stat().st_size)
        reads += chunks(os.open(file, os.O_RDONLY), nbytes, chunk_bytes, write=False)
        remaining -= nbytes
    if remaining:
        raise SystemExit(f"--read-bytes is {remaining} more than the inputs have")

    clock = time.process_time if args.processor else time.perf_counter
    start = clock()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    out = os.open(args.write, flags | (os.O_DIRECT if args.fsync else 0), 0o666)
    nbytes = -(-args.write_bytes // mmap.PAGESIZE) * mmap.PAGESIZE if args.fsync else args.write_bytes
    run(interleave(reads, list(chunks(out, nbytes, chunk_bytes, write=True))), args.threads, chunk_bytes)
    if args.fsync:
        os.fsync(out)
    print(f"{clock() - start:.4f}")


if __name__ == "__main__":
    main()
