"""The errors a user can meet, each with the exit code its command ends with.

Owns the types and codes only. A message says what was looked at, what was found, what was
expected and what to do, in one or two lines; a census of files may take up to eleven.
"""


class K3Error(Exception):
    """The run failed. Exit code 1."""

    exit_code = 1
    advice = ""  # a line that says what puts it right, where that does not fit into the message


class UsageError(K3Error):
    """An argument or an input that cannot be used. Exit code 2."""

    exit_code = 2


class ModelFilesError(K3Error):
    """Model files are missing, damaged or not a Kimi K3 that this package can run. Exit code 3."""

    exit_code = 3


class ResourceError(K3Error):
    """The work would not fit into memory or disk, or the requested device is absent. Exit code 4."""

    exit_code = 4
