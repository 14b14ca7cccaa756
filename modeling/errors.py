"""The one exception that means "the user can mend this"."""


class InputError(ValueError):
    """Bad input from the user: a file, a configuration key, an option or a prompt.

    The message is one line that names what is wrong and how to mend it. Command lines print it as
    ``error: ...`` and exit with status 2.
    """
