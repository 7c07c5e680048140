"""Objects behind URLs, through fsspec: asked again as `data.remote` says, and downloaded whole.

fsspec finds the client of a URL and its settings: `FSSPEC_<PROTOCOL>_<OPTION>`, `~/.config/fsspec/*.json`, and the
client's own (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, `GOOGLE_APPLICATION_CREDENTIALS`, `HF_TOKEN`, ...).
A failure that may pass (stalls, cuts, 5xx, short bodies) is retried; one that lasts ends the run and never looks like
a damaged sample.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

import aiohttp
import fsspec
from fsspec.callbacks import Callback
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from ssl_vit.data import RemoteConfig
from ssl_vit.interfaces import RunError, UserError

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a retry, doubling
BLOCK = 1 << 23  # bytes of one range of an object store
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# Local refusals, and what asking again does not change.
_LASTING = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.ENOENT, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
_MISTAKES = (TypeError, AttributeError, LookupError, AssertionError, ImportError, RuntimeError, MemoryError, ValueError)
# Clients by identity, for ever: a forked loader worker must not finalize its parent's, as fsspec would by emptying its
# own table. Their sockets and their event loop are shared, and the parent's next request would hang.
_clients: dict[int, Any] = {}
T = TypeVar("T")


def find_filesystem(url: str, timeout: float) -> tuple[Any, str]:
    """fsspec's file system for a URL, made in this process, and the path in it. Raises UserError."""
    protocol = fsspec.utils.get_protocol(url)
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = f"pip install 'ssl-vit[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else str(error)
        raise UserError(f"{url}: {protocol}:// needs a package that is not installed: {extra}") from None
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{url}: cannot open such a URL: {error}") from None
    if filesystem.async_impl:
        _clients[id(filesystem)] = filesystem
    return filesystem, str(path)


def ask(filesystem: Any, url: str, remote: RemoteConfig, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a file system's method (`glob`, `ls`, ...) with retries.

    Raises FileNotFoundError and PermissionError, UserError for other refusals, RunError after the last retry.
    """
    return _retried(url, remote, lambda: _call(filesystem, remote, method, *arguments, **options))


def _call(filesystem: Any, remote: RemoteConfig, method: str, *arguments: Any, **options: Any) -> Any:
    if filesystem.async_impl:  # other clients (hf://, sftp://) have their own time limits
        options["timeout"] = remote.timeout
    return getattr(filesystem, method)(*arguments, **options)


def _retried(url: str, remote: RemoteConfig, act: Callable[[], T]) -> T:
    def last(state: RetryCallState) -> T:
        error = state.outcome.exception() if state.outcome else None
        raise RunError(
            f"{url}: {_reason(error, remote)}; {state.attempt_number} tries in {state.seconds_since_start or 0:.0f} s "
            "failed: run the same command again when the server answers (data.remote.retries, data.remote.timeout)"
        ) from error

    policy = Retrying(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_attempt(remote.retries + 1),
        wait=wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
        retry_error_callback=last,
    )
    try:
        return policy(act)
    except (UserError, RunError):
        raise
    except Exception as error:
        root, status, reason = _root(error), _status(_root(error)), _reason(error, remote)
        if status == 404 or isinstance(root, FileNotFoundError):
            raise FileNotFoundError(url) from error
        if status in (401, 403) or isinstance(root, PermissionError) or _without_credentials(root):
            raise PermissionError(reason) from error
        if status is not None or isinstance(root, (OSError, ValueError, NotImplementedError)):
            if getattr(root, "errno", None) in _FULL:
                raise
            raise UserError(f"{url}: cannot be read: {reason}") from error
        raise


def _may_pass(error: BaseException) -> bool:
    error = _root(error)
    if (status := _status(error)) is not None:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, (UserError, RunError, *_MISTAKES)) or not isinstance(error, Exception):
        return False
    return getattr(error, "errno", None) not in (_LASTING | _FULL) and not (
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
    return next((place for place in places if isinstance(place, int)), None)


def _reason(error: BaseException | None, remote: RemoteConfig) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came for {remote.timeout:g} s"
    text = str(getattr(error, "strerror", None) or getattr(error, "message", None) or error).strip()
    status = _status(error) if error else None
    return (f"HTTP status {status}: " if status else "") + (text.splitlines()[0] if text else type(error).__name__)


def download(url: str, target: BinaryIO, remote: RemoteConfig, size: int | None = None, sha256: str = "") -> None:
    """Write a whole object to an open file; resumes where a connection broke.

    size (bytes), sha256: what it must have, as far as it is known. Raises UserError for an object that is missing,
    refused or another one, RunError when the server does not answer, OSError where the disk refuses.
    """
    for _ in range(2):  # a transfer can go wrong; twice in the same way it does not
        try:
            _fetch(url, target, remote, size)
        except FileNotFoundError:
            raise UserError(f"{url}: no such shard") from None
        except PermissionError as error:
            raise UserError(f"{url}: access is refused ({error}); check the credentials") from None
        target.truncate()
        target.seek(0)
        found = hashlib.file_digest(cast(Any, target), "sha256").hexdigest() if sha256 else ""
        target.seek(0)
        if found == sha256:
            return
    raise UserError(
        f"{url}: its sha256 is {found[:12]}..., expected {sha256[:12]}...: replaced or damaged; "
        "upload the shards and their info.json again"
    )


def _fetch(url: str, target: BinaryIO, remote: RemoteConfig, size: int | None) -> None:
    filesystem, path = find_filesystem(url, remote.timeout)
    transfer = _Transfer(url, target, size)
    step = _http_step if "http" in filesystem.protocol else _range_step
    target.seek(0)
    furthest = 0

    def attempt() -> bool:
        """Whether all of it is there; progress since the last failure begins a new count of tries."""
        nonlocal furthest
        try:
            step(filesystem, path, transfer, remote)
            return True
        except Exception as error:
            if not _may_pass(error) or target.tell() <= furthest:
                raise
            furthest = target.tell()
            return False

    while not _retried(url, remote, attempt):
        pass


class _Transfer(Callback):
    """Where a download stands, and the bound on its bytes; fsspec calls it for every response and part of it.

    total: bytes of the object, once they are known. declared: bytes of the response that arrives, from byte `start` on.
    """

    def __init__(self, url: str, target: BinaryIO, total: int | None) -> None:
        super().__init__()
        self.url, self.target, self.total = url, target, total
        self.start, self.declared = 0, total

    def set_size(self, size: int | None) -> None:
        """A response begins; it may be an error page, so nothing is concluded yet."""
        self.start, self.declared = self.target.tell(), size
        if size is None or size == self.total:  # all of it, whatever range was asked for
            self.target.seek(0)

    def relative_update(self, inc: int = 1) -> None:
        """A part was written. Raises UserError for an object of another size than expected."""
        if self.start and self.declared is None:
            self.target.seek(0)
            raise EOFError("the server does not say how many bytes it sends")
        self.total = self.declared if self.total is None else self.total
        if self.declared not in (None, self.total):
            self.check_size(self.start + (self.declared or 0))
        if self.total is not None and self.target.tell() > self.total:
            raise UserError(f"{self.url}: has more than the expected {self.total} bytes; upload the shards again")

    def check_size(self, size: int) -> None:
        if size != self.total:
            raise UserError(
                f"{self.url}: has {size} bytes, expected {self.total}: replaced or not uploaded whole; upload the "
                "shards and their info.json again"
            )

    def check_end(self) -> None:
        if self.total is not None and self.target.tell() != self.total:
            raise EOFError(f"the object ended after {self.target.tell()} of {self.total} bytes")


def _http_step(filesystem: Any, path: str, transfer: _Transfer, remote: RemoteConfig) -> None:
    """One GET, from where the last one broke off; a server that does not know ranges begins again."""
    start = transfer.target.tell() if transfer.total else transfer.target.seek(0)
    if start and start == transfer.total:
        return
    headers = {**filesystem.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    filesystem.get_file(path, transfer.target, callback=transfer, headers=headers)
    transfer.check_end()


def _range_step(filesystem: Any, path: str, transfer: _Transfer, remote: RemoteConfig) -> None:
    """Ranges of an object, one after the other."""
    about = _call(filesystem, remote, "info", path)
    if about["type"] != "file":
        raise FileNotFoundError(path)
    transfer.total = int(about["size"]) if transfer.total is None else transfer.total
    transfer.check_size(int(about["size"]))
    options = {} if filesystem.async_impl else {"cache_type": "none"}
    while (start := transfer.target.tell()) < transfer.total:
        end = min(start + BLOCK, transfer.total)
        data = _call(filesystem, remote, "cat_file", path, start=start, end=end, **options)
        if len(data) != end - start:
            raise EOFError(f"{len(data)} of the {end - start} bytes from byte {start} on came")
        transfer.target.write(data)
