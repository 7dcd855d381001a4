"""Access keys of a rehearsal: the person's, and one for each job, which is not enough to start or stop jobs."""

import hmac
import secrets
import string
import threading
from dataclasses import dataclass, field

LETTERS = string.ascii_uppercase + string.digits


@dataclass(frozen=True)
class Key:
    """What a request is signed with; `job` is the ARN of the job whose hosts have it, None is the person's."""

    id: str
    secret: str = field(repr=False)
    job: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The key as an AWS client finds it in its environment."""
        return {"AWS_ACCESS_KEY_ID": self.id, "AWS_SECRET_ACCESS_KEY": self.secret}


def new(job: str | None = None) -> Key:
    """Return a random key; the id has 20 characters, as moto expects of one."""
    return Key(
        "REHEARSAL" + "".join(secrets.choice(LETTERS) for _ in range(11)),
        secrets.token_urlsafe(30),
        job,
    )


class Keys:
    """The keys that an endpoint knows."""

    def __init__(self) -> None:
        self.person, self.jobs, self.lock = new(), {}, threading.Lock()

    def of_job(self, arn: str) -> Key:
        """Return a job's key, made when it is first asked for."""
        with self.lock:
            return self.jobs.setdefault(arn, new(arn))

    def find(self, name: str) -> Key | None:
        """Return the key of an id; how long that takes does not tell how much of an id is right."""
        with self.lock:
            known = [self.person, *self.jobs.values()]
        return next(
            (key for key in known if hmac.compare_digest(key.id.encode(), name.encode())), None
        )
