"""Merges of models on a web server, through a link of bounded speed, beside the time that moving their bytes takes.

    python -m benchmarks.stream --scale 1b [--jobs linear ties] [--link 200] [--runs 3]

The server is a process of its own on this machine; its answers share a link of `--link` MB/s. `link` fetches what the merge
reads, 16 connections at a time, and throws it away. The streamed merge is compared with one of local files first: they are
equal, byte for byte. Times are of whole processes, which do not wait for the disk; the server's files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.bench import WORK
from benchmarks.jobs import JOBS, Job
from benchmarks.models import ROOT, SCALES, build
from benchmarks.process import check_same, in_turn, run

PIECE_BYTES = 256 << 10
"""Sent at a time: at 200 MB/s, 1.3 ms of the link."""
CONNECTIONS = 16
RANGE_BYTES = 8 << 20


# ---- the server


class Link:
    """A link that all connections share. `pass_on` waits until so many bytes may be sent."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free = time.monotonic()
        self._mutex = threading.Lock()

    def pass_on(self, nbytes: int) -> None:
        """Wait for room. An idle link does not save up."""
        with self._mutex:
            self._free = max(self._free, time.monotonic()) + nbytes / self._rate
            wait = self._free - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def serve(folder: Path, bytes_per_second: float) -> None:
    """Serve the files of a folder until the process is ended; prints the port."""
    link = Link(bytes_per_second)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            file = folder / self.path.lstrip("/")
            if not file.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = file.stat().st_size
            start, end, asked = 0, size, self.headers.get("Range", "")
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, end = int(first), min(size, int(last) + 1)
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{size:x}-{file.stat().st_mtime_ns:x}"')
            self.send_header("Content-Length", str(end - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if body:
                self.wfile.flush()
                with file.open("rb") as stream:
                    while start < end:
                        count = min(PIECE_BYTES, end - start)
                        link.pass_on(count)
                        start += os.sendfile(self.connection.fileno(), stream.fileno(), start, count)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def served(folder: Path, megabytes_per_second: float) -> Iterator[int]:
    """The port of a server."""
    command = [sys.executable, "-m", "benchmarks.stream", "--serve", str(folder), "--link", str(megabytes_per_second)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


# ---- moving the bytes


def fetch(address: str) -> None:
    """Fetch files and throw them away. address: `host:port/` and, with commas between, path=size in bytes."""
    host, _, files = address.partition("/")
    local = threading.local()

    def get(place: tuple[str, int, int]) -> int:
        path, start, end = place
        if not hasattr(local, "connection"):
            local.connection = HTTPConnection(host)
        local.connection.request("GET", path, headers={"Range": f"bytes={start}-{end - 1}"})
        answer, buffer, count = local.connection.getresponse(), bytearray(1 << 20), 0
        while got := answer.readinto(buffer):
            count += got
        return count

    places = []
    for path, size in (entry.split("=") for entry in files.split(",")):
        places += [(path, at, min(int(size), at + RANGE_BYTES)) for at in range(0, int(size), RANGE_BYTES)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        if sum(pool.map(get, places)) != sum(end - start for _, start, end in places):
            raise SystemExit("the server sent too little")


# ---- the measurement


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="1b")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["linear", "ties"])
    parser.add_argument("--link", type=float, default=200, help="MB/s")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fetch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve, args.link * 1e6)
    if args.fetch is not None:
        return fetch(args.fetch)
    folder = build(args.scale, args.root)
    with served(folder, args.link) as port:
        print("| merge | moved GB | at the link's speed s | link s | streamed s | streamed / link | CPU s | peak RSS MB |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name in args.jobs:
            print(measure(JOBS[name], folder, port, args.link, args.runs), flush=True)


def measure(job: Job, folder: Path, port: int, link: float, runs: int) -> str:
    """A row: medians of `runs` runs, the two in turn. Raises SystemExit if the streamed merge differs from a local one."""
    layers, work = SCALES[folder.name].layers, WORK / "stream"
    work.mkdir(parents=True, exist_ok=True)
    inputs = [file for model in job.inputs for file in sorted((folder / model).glob("*.safetensors"))]
    merge = [sys.executable, "-m", "weightsmith", "merge", "--overwrite", "--quiet", "--no-fsync"]
    for where, place in (("local", folder.absolute()), ("streamed", f"http://127.0.0.1:{port}")):
        text = job.recipe(folder, layers).replace(str(folder), str(place))
        (work / f"{where}.yml").write_text(text, encoding="utf-8")
        run([*merge, str(work / f"{where}.yml"), str(work / where)], work / "log")
    check_same(work / "local", work / "streamed")
    listed = ",".join(f"/{file.relative_to(folder)}={file.stat().st_size}" for file in inputs)
    rivals = {
        "link": [sys.executable, "-m", "benchmarks.stream", "--fetch", f"127.0.0.1:{port}/{listed}"],
        "streamed": [*merge, str(work / "streamed.yml"), str(work / "streamed")],
    }
    done = in_turn(rivals, runs, inputs, work / "log")
    shutil.rmtree(work)
    moved = sum(file.stat().st_size for file in inputs)
    wall = {name: statistics.median(run.wall_seconds for run in runs) for name, runs in done.items()}
    cpu = statistics.median(run.cpu_seconds for run in done["streamed"])
    peak = max(run.peak_rss_bytes for run in done["streamed"])
    return (
        f"| {job.name} | {moved / 1e9:.2f} | {moved / link / 1e6:.1f} | {wall['link']:.1f} | {wall['streamed']:.1f} "
        f"| {wall['streamed'] / wall['link']:.2f} | {cpu:.1f} | {peak / 1e6:.0f} |"
    )


if __name__ == "__main__":
    main()
