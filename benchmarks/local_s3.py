"""An S3 that serves a folder, with a latency and a bandwidth set by hand, and faults.

    python -m benchmarks.local_s3 FOLDER [--latency=0.05] [--bandwidth=BYTES]

It answers GetObject, also of ranges, and ListObjectsV2, in path style: the folder has a folder for
each bucket. It looks at no credentials. Requests of all kinds are counted in REQUESTS.
"""

import argparse
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PIECE = 2**16  # bytes sent at a time
Fault = Callable[[str, int], tuple[int, str] | int | float | None]
"""Gets the key and the number of the request for it, from 0. Returns the status and the error code
of an answer, or the number of bytes after which the connection is lost, or the seconds between two
bytes, as a float; None for no fault."""


class Server(ThreadingHTTPServer):
    """The server.

    Args:
        folder: What it serves.
        latency: Seconds before an answer.
        bandwidth: Bytes/s of all answers together; 0 for no limit.
        fault: What goes wrong.
        port: The port; a free one if 0.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        folder: Path,
        latency: float = 0.0,
        bandwidth: float = 0.0,
        fault: Fault = lambda key, number: None,
        port: int = 0,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder.resolve()
        self.latency = latency
        self.bandwidth = bandwidth
        self.fault = fault
        self.requests: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.free_at = 0.0

    @property
    def endpoint(self) -> str:
        """The URL for AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that has closed its connection."""

    def pace(self, size: int) -> None:
        """Wait as long as `size` bytes take."""
        if self.bandwidth:
            with self.lock:
                now = time.monotonic()
                self.free_at = max(self.free_at, now) + size / self.bandwidth
                pause = self.free_at - now
            time.sleep(pause)


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:  # noqa: N802 (http.server's name)
        """Answer GetObject or ListObjectsV2."""
        url = urlsplit(self.path)
        key = unquote(url.path).strip("/")
        query = parse_qs(url.query)
        if key == "REQUESTS":
            self.answer(200, repr(dict(self.server.requests)).encode())
            return
        is_list = "list-type" in query
        with self.server.lock:
            self.server.requests["list" if is_list else "get"] += 1
            number = self.server.asked[key]
            self.server.asked[key] += 1
        time.sleep(self.server.latency)
        found = self.server.fault(key, number)
        if isinstance(found, tuple):
            self.refuse(*found)
        elif is_list:
            self.list(key, query.get("prefix", [""])[0])
        else:
            self.send_object(self.server.folder / key, found)

    def refuse(self, status: int, code: str) -> None:
        """Answer with an error."""
        text = f"<Error><Code>{code}</Code><Message>refused</Message></Error>"
        self.answer(status, text.encode())

    def list(self, bucket: str, prefix: str) -> None:
        """Answer ListObjectsV2 for a prefix that is a folder."""
        folder = self.server.folder / bucket / prefix
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        entries = "".join(
            f"<Contents><Key>{escape(prefix + path.name)}</Key>"
            f"<Size>{path.stat().st_size}</Size></Contents>"
            for path in paths
            if path.is_file()
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self.answer(200, text.encode())

    def send_object(self, path: Path, fault: float | None) -> None:
        """Answer GetObject, whole or a range, with a fault in how its bytes are sent."""
        lost_after = fault if isinstance(fault, int) else None
        seconds = fault if isinstance(fault, float) else 0.0
        if not path.is_file():
            self.refuse(404, "NoSuchKey")
            return
        size = path.stat().st_size
        start, stop = 0, size
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, stop = int(match[1]), min(size, int(match[2]) + 1)
        if start >= size:
            self.refuse(416, "InvalidRange")
            return
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("ETag", '"0"')
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            left = min(stop - start, size if lost_after is None else lost_after)
            while left:
                data = file.read(1 if seconds else min(PIECE, left))
                self.server.pace(len(data))
                time.sleep(seconds)
                self.wfile.write(data)
                left -= len(data)
        if lost_after is not None:
            self.close_connection = True

    def answer(self, status: int, body: bytes) -> None:
        """Send a short answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def served(folder: Path, **options: object) -> Iterator[Server]:
    """Serve a folder from a thread while the block lasts."""
    server = Server(folder, **options)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before an answer")
    parser.add_argument("--bandwidth", type=float, default=0, help="bytes/s of all answers")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    server = Server(args.folder, args.latency, args.bandwidth, port=args.port)
    print(server.endpoint, flush=True)
    server.serve_forever()
