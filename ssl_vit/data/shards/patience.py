"""How long a failing server is put up with: which failures pass, how long to wait, and what to say in the end."""

from __future__ import annotations

import errno
import random
import time

from ssl_vit.data import RemoteConfig
from ssl_vit.interfaces import RunError, UserError

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a try is repeated: doubling, between half and all of it
# What asking again does not change, and what is a mistake in a program rather than a failure on the way.
_REFUSALS = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
_MISTAKES = (TypeError, AttributeError, LookupError, AssertionError, ImportError, RuntimeError, MemoryError)
_PASSING_STATUS = {408, 425, 429}
_jitter = random.SystemRandom()  # forked workers would share any other's state, and checkpoints hold `random`'s


class Patience:
    """Counts the tries since the last progress, waits between them, and ends them."""

    def __init__(self, url: str, remote: RemoteConfig) -> None:
        self.url, self.remote = url, remote
        self.progressed()

    def progressed(self) -> None:
        self.tries, self.since = 0, time.monotonic()

    def failed(self, error: Exception) -> None:
        """Wait before the next try. Raises what trying again does not mend, and RunError after the last try."""
        status, names = _status(error), {kind.__name__ for kind in type(error).__mro__}
        if status == 404:
            raise FileNotFoundError(self.url) from error
        # gcsfs has neither a type nor a number for 403
        if status in (401, 403) or names & _NO_CREDENTIALS or str(error).startswith("Forbidden"):
            raise PermissionError(reason(error, self.remote)) from error
        if isinstance(error, (UserError, RunError, FileNotFoundError, PermissionError, *_MISTAKES)):
            raise error
        if (
            isinstance(error, (ValueError, NotImplementedError))  # the second: what a file system cannot do
            or (isinstance(error, OSError) and error.errno in _REFUSALS)
            or (status is not None and 400 <= status < 500 and status not in _PASSING_STATUS)
        ):
            raise UserError(f"{self.url}: cannot be read: {reason(error, self.remote)}") from error
        self.tries += 1
        if self.tries > self.remote.retries:
            raise RunError(
                f"{self.url}: {reason(error, self.remote)}; {self.tries} tries in "
                f"{time.monotonic() - self.since:.0f} s brought nothing more: run the same command to go on when the "
                "server answers again (data.remote.retries and data.remote.timeout set the patience)"
            ) from error
        time.sleep(min(FIRST_WAIT * 2 ** (self.tries - 1), LONGEST_WAIT) * _jitter.uniform(0.5, 1))


def _status(error: Exception) -> int | None:
    """The HTTP status that an error carries: aiohttp's, gcsfs's, then Hugging Face's."""
    response = getattr(error, "response", None)
    places = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((place for place in places if isinstance(place, int)), None)


def reason(error: Exception, remote: RemoteConfig) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came for {remote.timeout:g} s"
    text = str(getattr(error, "strerror", None) or getattr(error, "message", None) or error).strip()
    status = _status(error)
    return (f"HTTP status {status}: " if status else "") + (text.splitlines()[0] if text else type(error).__name__)
