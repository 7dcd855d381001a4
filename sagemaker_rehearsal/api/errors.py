"""Errors that the endpoint answers with, in the form of the AWS JSON protocol."""


class Refused(Exception):
    """A request that is refused.

    `code` is the error's name, as in a client's `error.response["Error"]["Code"]`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> Refused:
    """Return the service's error for a request whose content it does not accept."""
    return Refused("ValidationException", message)


def not_emulated(what: str) -> Refused:
    """Return the error for what the service has and the rehearsal does not."""
    return invalid(f"The rehearsal does not emulate {what}; leave it out, or run the job on AWS")
