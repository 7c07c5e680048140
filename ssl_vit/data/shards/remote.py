"""Objects behind URLs as files: read in order, taken up again where a connection broke, given up after a set patience.

fsspec finds the client of a URL and its settings: `FSSPEC_<PROTOCOL>_<OPTION>`, `~/.config/fsspec/*.json`, and the
client's own (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, `GOOGLE_APPLICATION_CREDENTIALS`, `HF_TOKEN`, ...).
A failure that passes (stalls, cuts, 5xx, short bodies) is tried again; one that lasts ends the run, and never looks
like a damaged sample.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import fsspec
from fsspec.asyn import sync

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards.patience import Patience, reason
from ssl_vit.interfaces import UserError

_CHUNK = 1 << 20
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 18, 1 << 24  # of the ranges asked of an object store
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# What S3, Google, Hugging Face and others call it, in `fsspec`'s information on a file.
_VERSION_NAMES = ("ETag", "etag", "generation", "VersionId", "LastModified", "mtime", "modified", "blob_id", "lfs")
# Clients by identity, for ever: a forked loader worker must not finalize its parent's, as fsspec would by emptying its
# own table. Their sockets and their event loop are shared, and the parent's next request would hang.
_clients: dict[int, Any] = {}


def find_filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL or local path, made in this process, and the path in it. Raises UserError."""
    protocol = fsspec.utils.get_protocol(url)
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        mend = f"pip install 'ssl-vit[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else str(error)
        raise UserError(f"{url}: {protocol}:// needs a package that is not installed: {mend}") from None
    except (ValueError, NotImplementedError) as error:  # fsspec has the second for what a file system cannot do
        raise UserError(f"{url}: cannot open such a URL: {error}") from None
    if filesystem.async_impl:
        _clients[id(filesystem)] = filesystem
    return filesystem, str(path)


def ask(filesystem: Any, url: str, remote: RemoteConfig, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a file system's method (`glob`, `ls`, ...), again and again as `remote` says.

    Raises FileNotFoundError and PermissionError, UserError for other refusals, RunError when patience has run out.
    """
    patience = Patience(url, remote)
    while True:
        try:
            return _call(filesystem, remote.timeout, method, *arguments, **options)
        except Exception as error:
            patience.failed(error)


def _call(filesystem: Any, timeout: float, method: str, *arguments: Any, **options: Any) -> Any:
    """A file system's method within a time limit, which cancels the request; clients that are not asynchronous
    (hf://, sftp://) have their own limits."""
    if filesystem.async_impl:
        return sync(filesystem.loop, getattr(filesystem, f"_{method}"), *arguments, timeout=timeout, **options)
    return getattr(filesystem, method)(*arguments, **options)


class RemoteFile(io.RawIOBase):
    """One object from its first byte to its last.

    size: bytes; what `info.json` says, else what the server says (None: neither does). tag: tells the versions of the
    object apart, "" where the server does not; known once connected.
    """

    def __init__(self, url: str, remote: RemoteConfig, size: int | None = None) -> None:
        self.url, self.remote, self.size, self.tag, self.position = url, remote, size, "", 0
        self.block = 1 << 20
        self.source: _Source | None = None
        self.rest = memoryview(b"")
        self.patience = Patience(url, remote)

    def connect(self) -> RemoteFile:
        """Open the object now, so that one that is not there is known before anything is read. Raises as reading."""
        self._try(lambda source: b"")
        return self

    def restart(self) -> None:
        """Read from the first byte again."""
        if self.position:
            self._disconnect()
            self.position, self.rest = 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises UserError for what is missing, refused or of another size, RunError when patience has run out."""
        if not self.rest:
            data = self._try(self._next)
            if data:
                self.patience.progressed()
            self.position += len(data)
            self.rest = memoryview(data)
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count

    def _next(self, source: _Source) -> bytes:
        data = source.read()
        if not data and self.size is not None and self.position < self.size:
            raise EOFError(f"the object ended after {self.position} of {self.size} bytes")
        return data

    def _try(self, act: Callable[[_Source], bytes]) -> bytes:
        while True:
            try:
                if self.source is None:
                    self.source = self._connected()
                return act(self.source)
            except Exception as error:
                self._disconnect()
                if self.position == self.size:  # all of it is here; only its end mark is missing
                    return b""
                if isinstance(error, TimeoutError):  # a slow line: ask for less at a time
                    self.block = max(self.block // 4, _SMALLEST_BLOCK)
                try:
                    self.patience.failed(error)
                except FileNotFoundError:
                    raise UserError(f"{self.url}: no such shard") from None
                except PermissionError as refused:
                    raise UserError(
                        f"{self.url}: access is refused ({reason(refused, self.remote)}): check the credentials"
                    ) from None

    def _connected(self) -> _Source:
        filesystem, path = find_filesystem(self.url)
        http = "http" in filesystem.protocol
        kind: type[_Source] = _HttpSource if http else _BlockSource if filesystem.async_impl else _FileSource
        source = kind(filesystem, path, self)
        if self.size is not None and source.size is not None and source.size != self.size:
            source.close()
            raise UserError(
                f"{self.url}: has {source.size} bytes, where {self.size} are expected: it was replaced or not uploaded "
                "whole; upload the shards and their info.json again"
            )
        self.size = source.size if self.size is None else self.size
        self.tag = source.tag
        return source

    def _disconnect(self) -> None:
        source, self.source = self.source, None
        if source:
            source.close()

    def close(self) -> None:
        if not self.closed:
            self._disconnect()
        super().close()


class _Source(Protocol):
    """A connection that reads on from `RemoteFile.position`; dropped after any error."""

    size: Any  # int | None
    tag: str

    def __init__(self, filesystem: Any, path: str, file: RemoteFile) -> None: ...
    def read(self) -> bytes: ...
    def close(self) -> None: ...


class _HttpSource:
    """One GET; from a server that does not know ranges, again from the beginning."""

    def __init__(self, filesystem: Any, url: str, file: RemoteFile) -> None:
        self.loop, self.timeout = filesystem.loop, file.remote.timeout
        self.broken: Exception | None = None
        self.ready = sync(self.loop, self._start, filesystem, url, file.position)
        headers = self.response.headers
        part = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
        start, whole = 0, headers.get("Content-Length", "")
        if self.response.status == 206 and part:
            start, whole = int(part[1]), part[2]
        self.skip = file.position - start
        if self.skip < 0:
            self.close()
            raise EOFError(f"asked to go on from byte {file.position}, the server goes on from {start}")
        self.size = int(whole) if whole.isdecimal() else None
        self.tag = headers.get("ETag") or headers.get("Last-Modified") or ""

    async def _start(self, filesystem: Any, url: str, position: int) -> bytes:
        """The headers and the first bytes at once: aiohttp drops what nobody has taken when the connection breaks."""
        async with asyncio.timeout(self.timeout):
            self.response = await self._get(filesystem, url, position)
        return await self._receive()

    async def _get(self, filesystem: Any, url: str, position: int) -> Any:
        import aiohttp

        headers = {**filesystem.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        if position:
            headers["Range"] = f"bytes={position}-"
        options = {**filesystem.kwargs, "headers": headers, "auto_decompress": False}
        options["timeout"] = aiohttp.ClientTimeout(total=None)  # the limit is on each wait, not on the whole object
        session = await filesystem.set_session()
        response = await session.get(filesystem.encode_url(url), **options)
        response.raise_for_status()
        return response

    def read(self) -> bytes:
        while True:
            if self.broken and not self.ready:
                raise self.broken
            data, self.ready = self.ready or sync(self.loop, self._receive), b""
            skipped = min(self.skip, len(data))
            self.skip -= skipped
            if skipped < len(data) or not (data or self.broken):
                return data[skipped:]

    async def _receive(self) -> bytes:
        """About a megabyte, or what came before the connection broke."""
        parts: list[bytes] = []
        try:
            while sum(map(len, parts)) < _CHUNK:
                async with asyncio.timeout(self.timeout):
                    parts.append(await self.response.content.readany())
                if not parts[-1]:
                    break
        except Exception as error:
            self.broken = error
        return b"".join(parts)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.response.close)


class _BlockSource:
    """Ranges of an object, of growing size: any store with an asynchronous client."""

    def __init__(self, filesystem: Any, path: str, file: RemoteFile) -> None:
        self.call = partial(_call, filesystem, file.remote.timeout)
        self.path, self.file = path, file
        self.size, self.tag = _size_and_tag(path, self.call("info", path))

    def read(self) -> bytes:
        start = self.file.position
        end = min(start + self.file.block, self.size)
        if start >= end:
            return b""
        data = bytes(self.call("cat_file", self.path, start=start, end=end))
        self.file.block = min(2 * self.file.block, _LARGEST_BLOCK)
        return data

    def close(self) -> None:
        pass


class _FileSource:
    """A file of a client that is not asynchronous."""

    def __init__(self, filesystem: Any, path: str, file: RemoteFile) -> None:
        self.size, self.tag = _size_and_tag(path, filesystem.info(path))
        self.file = filesystem.open(path, "rb", cache_type="none")
        self.file.seek(file.position)

    def read(self) -> bytes:
        return bytes(self.file.read(_LARGEST_BLOCK))

    def close(self) -> None:
        self.file.close()


def _size_and_tag(path: str, about: dict[str, Any]) -> tuple[int, str]:
    if about["type"] != "file":
        raise FileNotFoundError(path)
    return int(about["size"]), "|".join(str(about[name]) for name in _VERSION_NAMES if about.get(name))
