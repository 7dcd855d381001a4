"""UserError: a mistake of the user's, raised as one on purpose."""


class UserError(ValueError):
    """A mistake in the settings, the data or the machine of a job.

    Its text is one line: which flag or file, what was found, what is allowed, what to do.
    contract/failures.py shows that line alone. It shows any other error, a plain ValueError too,
    with its traceback. A user's own model, data module or callback may raise it as well.
    """
