"""`pipe:COMMAND` in place of a URL: the command's output as a file, for who has allowed it."""

from __future__ import annotations

import io
from typing import Any

from webdataset.gopen import gopen

from ssl_vit.interfaces import RunError


class PipeFile(io.RawIOBase):
    """What a shell command writes, for `pipe:COMMAND`; WebDataset starts it. A command that fails is a RunError."""

    def __init__(self, url: str) -> None:
        self.url, self.pipe = url, gopen(url, "rb", bufsize=1 << 20)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self.pipe.stream.readinto(buffer))
        if not count and (status := self.pipe.proc.wait()):
            raise RunError(f"{self.url}: the command ended with exit code {status}; run the same command to go on")
        return count

    def close(self) -> None:
        if not self.closed:
            self.pipe.proc.terminate()  # nothing more is wanted, whatever it still does
            self.pipe.ignore_errors = True
            self.pipe.close()
        super().close()
