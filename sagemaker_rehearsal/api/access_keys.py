"""Access keys of a rehearsal: the person's, one for each job, and the token of the web page.

A job's key is not allowed to start or stop jobs.
"""

import hmac
import secrets
import string
import threading
from dataclasses import dataclass, field

LETTERS = string.ascii_uppercase + string.digits


@dataclass(frozen=True)
class Key:
    """A key that signs requests; `job` is its job's ARN, None for the person's key."""

    id: str
    secret: str = field(repr=False)
    job: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The key as environment variables of an AWS client."""
        return {"AWS_ACCESS_KEY_ID": self.id, "AWS_SECRET_ACCESS_KEY": self.secret}


def new(job: str | None = None) -> Key:
    """Return a random key; its id has 20 characters, as moto expects."""
    return Key(
        "REHEARSAL" + "".join(secrets.choice(LETTERS) for _ in range(11)),
        secrets.token_urlsafe(30),
        job,
    )


class Keys:
    """The keys that an endpoint knows."""

    def __init__(self) -> None:
        self.person = new()
        self.page_token = secrets.token_urlsafe(32)
        self.jobs: dict[str, Key] = {}
        self.lock = threading.Lock()

    def of_job(self, arn: str) -> Key:
        """Return a job's key; it is made at the first call."""
        with self.lock:
            return self.jobs.setdefault(arn, new(arn))

    def find(self, name: str) -> Key | None:
        """Return the key with an id, None if there is none.

        The comparison takes the same time however much of an id is right.
        """
        with self.lock:
            known = [self.person, *self.jobs.values()]
        return next(
            (key for key in known if hmac.compare_digest(key.id.encode(), name.encode())), None
        )
