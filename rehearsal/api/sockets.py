"""The endpoint's sockets: how long a stranger may take, and how many connections there are at once."""

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

STRANGERS = 10  # seconds in all, until a request has shown its key
GUESTS = 3600  # ... from then on, for an upload of gigabytes
PAUSE = 60  # seconds in which something has to come
REST = 0.5  # ... when the answer is given, of what is not read by then
AT_ONCE = 128  # connections of an address
QUEUE = 5  # seconds that one more waits


class Patience(io.RawIOBase):
    """A connection to read from, which ends in a TimeoutError when its time is over."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.until, self.pause = connection, time.monotonic() + STRANGERS, PAUSE

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def readinto(self, buffer) -> int:
        """Read what has come."""
        self.connection.settimeout(min(self.pause, self._left()))
        found = self.connection.recv_into(buffer)
        self.connection.settimeout(self._left())  # of what is sent
        return found

    def welcome(self) -> None:
        """Have more time: the request has a key."""
        self.until = time.monotonic() + GUESTS
        self.connection.settimeout(GUESTS)

    def _left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class Handler(WSGIRequestHandler):
    """Says nothing of the requests that it answers, and nothing of what answers them."""

    def setup(self) -> None:
        """Read with patience."""
        super().setup()
        self.patience = Patience(self.connection)
        self.rfile = io.BufferedReader(self.patience, 65536)

    def make_environ(self) -> dict:
        """Return the request; `rehearsal.welcome` gives it more time."""
        return super().make_environ() | {"rehearsal.welcome": self.patience.welcome}

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin to answer; the client need not send more."""
        self.patience.pause = REST
        super().send_response(code, message)

    def version_string(self) -> str:
        """Return what the header Server says."""
        return "rehearsal"

    def log(self, *_) -> None:
        """Stay quiet."""


class Server(ThreadedWSGIServer):
    """A server that closes a connection for which there is no room."""

    def __init__(self, *given, **more) -> None:
        super().__init__(*given, **more)
        self.free = threading.BoundedSemaphore(AT_ONCE)

    def process_request(self, request, client_address) -> None:
        """Answer from a thread, if there is one left."""
        if self.free.acquire(timeout=QUEUE):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:
        """Answer, and make room for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()


@contextlib.contextmanager
def served(
    application: Callable, port: int, addresses: list[str], handler: type[Handler] = Handler
) -> Iterator[int]:
    """Serve at `port` (0: a free one) of each address for as long as the block, and yield the port."""
    servers: list[Server] = []
    try:
        for address in addresses:
            servers.append(Server(address, port, application, handler))
            port = servers[0].port
            threading.Thread(
                target=servers[-1].serve_forever, name=f"endpoint {address}", daemon=True
            ).start()
        yield port
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
