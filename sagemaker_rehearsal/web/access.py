"""Decides which requests are for the web page, and which of these may pass.

A request must be for the loopback, must not come from another page, and must have the token of the
printed address. The token stays in the addresses of the page: a cookie of 127.0.0.1 would go to all
ports there, and so to whatever else listens.
"""

import hmac

from sagemaker_rehearsal.api import gate
from sagemaker_rehearsal.api.gate import Closed

LOOPBACK = "127.0.0.1"
# No bucket has a name with capital letters.
PATH = "/Rehearsal/page/"
# The name of the token in the query.
TOKEN = "token"


def is_for_page(environ: dict) -> bool:
    """Return whether a request is a browser's for the page; requests of AWS clients are signed."""
    names = [name for name, _ in gate.pairs(environ["REQUEST_URI"].partition("?")[2])]
    if "HTTP_AUTHORIZATION" in environ or any(name.startswith(b"X-Amz-") for name in names):
        return False
    path = environ["PATH_INFO"]
    is_of_browser = "text/html" in environ.get("HTTP_ACCEPT", "")
    return path.startswith(PATH) or (
        path == "/" and environ["REQUEST_METHOD"] == "GET" and is_of_browser
    )


def check(environ: dict, token: str) -> None:
    """Raise Closed unless a request for the page may pass; it then has more time."""
    gate.check_host(environ)
    if environ["SERVER_NAME"] != LOOPBACK:
        raise Closed(f"found a request for the page at another address, expected {LOOPBACK}")
    own = f"http://{environ['HTTP_HOST'].lower()}"
    # A browser says where a POST comes from.
    origins = (None, own) if environ["REQUEST_METHOD"] == "GET" else (own,)
    is_cross_site = environ.get("HTTP_SEC_FETCH_SITE", "none") not in ("none", "same-origin")
    if is_cross_site or environ.get("HTTP_ORIGIN") not in origins:
        raise Closed(
            "found a request of another web page; paste the address that the rehearsal has printed "
            "into the browser's address bar"
        )
    given = dict(gate.pairs(environ["REQUEST_URI"].partition("?")[2])).get(TOKEN.encode(), b"")
    if not hmac.compare_digest(given, token.encode()):
        raise Closed("open the address that the rehearsal has printed: it has a token")
    environ.get("rehearsal.welcome", lambda: None)()
