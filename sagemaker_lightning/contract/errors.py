"""The user's mistake, apart from every other error: who raises it means it."""


class UserError(ValueError):
    """A mistake in the settings, the data or the machine that a job was given.

    Its text is one line: which flag or file, what was found, what is allowed, what to do. contract/failures.py shows
    that line alone; any other error, a plain ValueError too, is shown with its traceback. A user's own model, data
    module or callback may raise it as well.
    """
