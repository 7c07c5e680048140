"""Weights from the Hugging Face hub, and what the hub's errors mean."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, errors, get_session, snapshot_download

from ssl_vit.interfaces import RunError, UserError

WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")  # best first


_TIMEOUT = 10  # seconds; the client itself would retry for more than a minute


class Unreachable(RunError):
    """The hub cannot be reached, or the download broke off."""


@contextmanager
def hub_errors(model: str) -> Iterator[None]:
    """Raise UserError where the hub denies access, Unreachable where it cannot be reached, RunError for a full disk.

    Where the hub does not answer, only its local cache is read.
    """
    before = constants.HF_HUB_OFFLINE
    try:
        constants.HF_HUB_OFFLINE = before or not _answers()
        yield
    except errors.LocalEntryNotFoundError as error:
        raise Unreachable(f"{model}: the hub does not answer, and its local cache does not have this model") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise UserError(f"{model}: no such model, or no access to it (try `hf auth login`): {error}") from None
    except errors.HFValidationError as error:
        raise UserError(f"{model}: {error}") from None
    except (OSError, errors.HTTPError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (RunError if full else Unreachable)(f"{model}: loading failed: {error}") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except (OSError, errors.HTTPError):
        return False
    return True


def download(model: str) -> Path:
    """A folder with the description and the weights of `ID` or `ID@REVISION`, in safetensors if possible.

    Raises UserError for a model that does not exist, Unreachable and RunError as `hub_errors` does.
    """
    repository, _, revision = model.partition("@")
    for file in WEIGHTS_FILES:
        wanted = ["config.json", "preprocessor_config.json", file]
        with hub_errors(model):
            folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
        if (folder / file).is_file():
            return folder
    raise UserError(f"{model}: its repository holds no {' and no '.join(WEIGHTS_FILES)}")
