"""The endpoint's sockets, with limits for connections and for their duration.

waitress and the like take a whole body before the application sees the request: whoever has no key
would fill the disk. Here the key is checked before the body is read, and gives the request time.
"""

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import urlsplit

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

# Seconds in all until a request must have shown a valid key.
STRANGER_SECONDS = 10
# Seconds in all after that, enough for an upload of gigabytes.
GUEST_SECONDS = 3600
# Seconds within which some data must come.
PAUSE_SECONDS = 60
# Seconds for data after the answer was given, for what is not read by then.
REST_SECONDS = 0.5
# Connections of one address at the same time.
MAX_CONNECTIONS = 128
# Seconds that one more connection waits.
QUEUE_SECONDS = 5


class Patience(io.RawIOBase):
    """A connection to read from, with time limits; TimeoutError when one is over."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + STRANGER_SECONDS
        self.pause = PAUSE_SECONDS

    def readable(self) -> bool:
        """Return True: the connection can be read."""
        return True

    def readinto(self, buffer) -> int:
        """Read the bytes that have come into `buffer`; return how many."""
        self.connection.settimeout(min(self.pause, self._seconds_left()))
        count = self.connection.recv_into(buffer)
        # For what is sent.
        self.connection.settimeout(self._seconds_left())
        return count

    def welcome(self) -> None:
        """Give the request more time, because it has a valid key."""
        self.until = time.monotonic() + GUEST_SECONDS
        self.connection.settimeout(GUEST_SECONDS)

    def expect_no_more(self) -> None:
        """Wait only shortly from now on: the client need not send more."""
        self.pause = REST_SECONDS

    def _seconds_left(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class Handler(WSGIRequestHandler):
    """A request handler that logs nothing, and names no software in its answers."""

    def setup(self) -> None:
        """Prepare to read with time limits."""
        super().setup()
        self.patience = Patience(self.connection)
        self.rfile = io.BufferedReader(self.patience, 65536)

    def run_wsgi(self) -> None:
        """Answer the request; an invalid address gets status 400."""
        try:
            urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
        else:
            super().run_wsgi()

    def make_environ(self) -> dict:
        """Return the environment; `rehearsal.welcome` in it gives the request more time."""
        return super().make_environ() | {"rehearsal.welcome": self.patience.welcome}

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin to answer; from now on the client need not send more."""
        self.patience.expect_no_more()
        super().send_response(code, message)

    def version_string(self) -> str:
        """Return the value of the header Server."""
        return "rehearsal"

    def log(self, *_) -> None:
        """Log nothing."""

    def log_request(self, *_) -> None:
        """Log nothing, and do not parse the address, which may be invalid."""


class Server(ThreadedWSGIServer):
    """A server with a limited number of connections; it closes those beyond."""

    def __init__(self, *arguments, **keywords) -> None:
        super().__init__(*arguments, **keywords)
        self.free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def server_bind(self) -> None:
        """Take the port; ValueError if it cannot be had. werkzeug would print that, and leave."""
        try:
            super().server_bind()
        except OSError as error:
            raise ValueError(
                f"--port: found {self.port}, which cannot be had at {self.host} "
                f"({error.strerror}); give another, or 0 for a free one"
            ) from error

    def serve(self, application: Callable) -> None:
        """Answer by a WSGI application from now on, in a thread, until `shutdown`."""
        self.app = application
        threading.Thread(
            target=self.serve_forever, name=f"endpoint {self.host}", daemon=True
        ).start()

    def process_request(self, request, client_address) -> None:
        """Answer in a thread of its own, if one is free within QUEUE_SECONDS."""
        if not self.free.acquire(timeout=QUEUE_SECONDS):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started, which would free it
            self.free.release()
            raise

    def process_request_thread(self, request, client_address) -> None:
        """Answer, and free the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()


@contextlib.contextmanager
def served(
    make: Callable[[int], Callable],
    port: int,
    addresses: list[str],
    handler: type[Handler] = Handler,
) -> Iterator[int]:
    """Serve at each address while the block runs; yield the port.

    Args:
        make: Returns the WSGI application, given the port.
        port: The port; 0 for a free one.
        addresses: The addresses to listen at.
        handler: The class of the request handlers.
    """
    servers: list[Server] = []
    serving: list[Server] = []
    try:
        for address in addresses:
            servers.append(Server(address, port, None, handler))
            port = servers[0].port
        application = make(port)
        for server in servers:
            server.serve(application)
            serving.append(server)
        yield port
    finally:
        for server in serving:  # for any other one, `shutdown` would wait for ever
            server.shutdown()
        for server in servers:
            server.server_close()
