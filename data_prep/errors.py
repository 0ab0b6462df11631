"""The one exception a user of this project is meant to read."""


class UserError(Exception):
    """Something outside the code is wrong: input, configuration or files.

    The message states the value that was found, the rule it breaks and the remedy. Command lines print it without a
    traceback and exit non-zero; nothing that existed before is lost.
    """
