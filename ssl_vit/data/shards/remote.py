"""Objects behind URLs, through fsspec: retried as `data.remote` says, and downloaded whole.

fsspec finds the client of a URL and its settings: `FSSPEC_<PROTOCOL>_<OPTION>`, `~/.config/fsspec/*.json`, and the
client's own (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, `GOOGLE_APPLICATION_CREDENTIALS`, `HF_TOKEN`, ...).
Transient failures (stalls, cuts, 5xx, short bodies) are retried; a lasting one ends the run and never looks like a
damaged sample.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import fsspec
from fsspec.callbacks import Callback
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from ssl_vit import files
from ssl_vit.data import RemoteConfig
from ssl_vit.interfaces import RunError, UserError

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a retry, doubling
NAME_THEM = "name the shards, such as URL/{000000..000009}.tar"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_REFUSED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.ENOENT, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
_MISTAKES = (TypeError, AttributeError, LookupError, AssertionError, ImportError, RuntimeError, MemoryError, ValueError)
# Clients by id, kept until the process exits. fsspec clears its own table in a forked loader worker, which would
# finalize the parent's clients: sockets and event loop are shared, and the parent's next request would hang.
_clients: dict[int, Any] = {}
T = TypeVar("T")


def find_filesystem(url: str, timeout: float) -> tuple[Any, str]:
    """fsspec's file system for a URL, made in this process, and the path in it. Raises UserError.

    timeout: seconds without a byte, for http and s3; other clients have limits of their own.
    """
    protocol = fsspec.utils.get_protocol(url)
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
    if protocol in ("s3", "s3a"):
        given = {**fsspec.config.conf.get("s3", {}), **fsspec.config.conf.get("s3a", {})}.get("config_kwargs", {})
        limits = {"connect_timeout": timeout, "read_timeout": timeout}
        options["config_kwargs"] = {**given, **limits, "retries": {"max_attempts": 1, "mode": "standard"}}
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = f"pip install 'ssl-vit[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else str(error)
        raise UserError(f"{url}: {protocol}:// needs a package that is not installed: {extra}") from None
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{url}: unsupported URL: {error}") from None
    if filesystem.async_impl:
        _clients[id(filesystem)] = filesystem
    if hasattr(filesystem, "retries"):  # s3fs: the retries are ours
        filesystem.retries = 1
    return filesystem, str(path)


def fetch(url: str, remote: RemoteConfig, most: int) -> bytes:
    """A small object's content. most: bytes, above which UserError is raised. Raises as `download` does."""
    with tempfile.NamedTemporaryFile(prefix="ssl-vit-") as target:
        download(url, target.name, remote, most=most)
        return Path(target.name).read_bytes()


def download(
    url: str, target: str, remote: RemoteConfig, size: int | None = None, sha256: str = "", most: int | None = None
) -> None:
    """Write a whole object to a local path.

    size (bytes), sha256: expected values, where they are known. most: bytes, where the size is not known (None:
    `data.remote.largest_gb`).

    Raises UserError for an object that is missing, too large, cannot be accessed or differs from what is expected,
    RunError when the server does not answer, OSError when the disk cannot be written.
    """
    filesystem, path = find_filesystem(url, remote.timeout)
    limit = (most or int(remote.largest_gb * 2**30)) if size is None else size
    options: dict[str, Any] = {}
    if "http" in filesystem.protocol:  # compression would change the size
        options["headers"] = {**filesystem.kwargs.get("headers", {}), "Accept-Encoding": "identity"}

    def transfer() -> None:
        filesystem.get_file(path, target, callback=_Bound(url, size, limit), **options)
        if size is not None and (actual := Path(target).stat().st_size) != size:
            raise EOFError(f"the object ended after {actual} of {size} bytes")

    for _ in range(2):  # a wrong checksum is retried once: a second one means that the object differs
        retried(url, remote, transfer)
        if not sha256 or (digest := files.sha256(Path(target))) == sha256:
            return
    raise UserError(
        f"{url}: its sha256 is {digest[:12]}..., expected {sha256[:12]}...: replaced or damaged; "
        "upload the shards and their info.json again"
    )


class _Bound(Callback):
    """Ends a download whose size is not the expected one or exceeds `most` bytes; fsspec calls it for every part that
    was written."""

    def __init__(self, url: str, expected: int | None, most: int) -> None:
        super().__init__()
        self.url, self.expected, self.most = url, expected, most

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        seen = max(self.size or 0, self.value)
        if self.expected is not None and (seen > self.expected or self.size not in (None, self.expected)):
            raise UserError(
                f"{self.url}: has {seen} bytes, expected {self.expected}: changed or not uploaded whole; upload the "
                "shards and their info.json again"
            )
        if seen > self.most:
            raise UserError(
                f"{self.url}: larger than the limit of {self.most} bytes; if this is the right object, list its size "
                "in info.json or raise data.remote.largest_gb"
            )


class NotThere(UserError):
    """A server has no such object."""


class Refused(UserError):
    """A server does not give an object to this user."""


def retried(url: str, remote: RemoteConfig, act: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a function, such as a file system's method, again until it succeeds.

    Raises NotThere, Refused or another UserError, RunError after the last retry, OSError where this disk is full.
    """

    def last(state: RetryCallState) -> T:
        error = state.outcome.exception() if state.outcome else None
        raise RunError(
            f"{url}: {_reason(error, remote)}; {state.attempt_number} tries in {state.seconds_since_start or 0:.0f} s "
            "failed: run the same command again when the server answers (data.remote.retries, data.remote.timeout)"
        ) from error

    policy = Retrying(
        retry=retry_if_exception(_is_transient),
        stop=stop_after_attempt(remote.retries + 1),
        wait=wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
        retry_error_callback=last,
    )
    try:
        return policy(act, *arguments, **options)
    except (UserError, RunError):
        raise
    except Exception as error:
        root, status, reason = _root(error), _status(_root(error)), _reason(error, remote)
        if status == 404 or isinstance(root, FileNotFoundError):
            raise NotThere(f"{url}: no such shard") from error
        if status in (401, 403) or isinstance(root, PermissionError) or _without_credentials(root):
            raise Refused(f"{url}: access is refused ({reason}); check the credentials") from error
        if status is not None or isinstance(root, (OSError, ValueError, NotImplementedError)):
            if getattr(root, "errno", None) in _FULL:
                raise
            raise UserError(f"{url}: cannot be read: {reason}") from error
        raise


def _is_transient(error: BaseException) -> bool:
    error = _root(error)
    if (status := _status(error)) is not None:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, (UserError, RunError, *_MISTAKES)) or not isinstance(error, Exception):
        return False
    return getattr(error, "errno", None) not in (_REFUSED | _FULL) and not (
        isinstance(error, (FileNotFoundError, PermissionError)) or _without_credentials(error)
    )


def _root(error: BaseException) -> BaseException:
    """fsspec's HTTP `info` says "not found" of every failure."""
    hidden = isinstance(error, FileNotFoundError) and isinstance(error.__cause__, (aiohttp.ClientError, TimeoutError))
    return error.__cause__ if hidden and error.__cause__ else error


def _without_credentials(error: BaseException) -> bool:
    # gcsfs has neither a type nor a number for 403.
    return bool({kind.__name__ for kind in type(error).__mro__} & _NO_CREDENTIALS) or str(error).startswith("Forbidden")


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error carries: aiohttp's, gcsfs's, then Hugging Face's."""
    response = getattr(error, "response", None)
    places = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((candidate for candidate in places if isinstance(candidate, int)), None)


def _reason(error: BaseException | None, remote: RemoteConfig) -> str:
    if isinstance(error, TimeoutError):
        return f"no data for {remote.timeout:g} s"
    text = str(getattr(error, "strerror", None) or getattr(error, "message", None) or error).strip()
    status = _status(error) if error else None
    return (f"HTTP status {status}: " if status else "") + (text.splitlines()[0] if text else type(error).__name__)
