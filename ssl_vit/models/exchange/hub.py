"""Weights from and to the Hugging Face hub: one place that knows what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, errors, get_token, snapshot_download
from huggingface_hub.utils import validate_repo_id

from ssl_vit.interfaces import RunError, UserError

# What holds a model, best first; the hub's repositories often hold the same weights for other frameworks too.
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
_DESCRIPTIONS = ["config.json", "preprocessor_config.json"]


@contextmanager
def answers(what: str, doing: str) -> Iterator[None]:
    """Turn the hub's refusals into UserError and a hub out of reach into RunError; `what` names the model."""
    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise RunError(f"{what}: {doing} needs the hub, which does not answer: {_first(error)}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise UserError(
            f"{what}: the hub has no such model, or this login may not see it (`hf auth login`): {_first(error)}"
        ) from None
    except errors.HFValidationError as error:
        raise UserError(f"{what}: {_first(error)}") from None
    except (OSError, errors.HTTPError) as error:
        raise RunError(f"{what}: {doing} failed: {_first(error)}") from error


def download(model: str) -> Path:
    """A folder with the description and the weights of `ID` or `ID@REVISION` (safetensors where there are any).

    Raises UserError for a model that is not there, RunError when the hub is out of reach.
    """
    repository, _, revision = model.partition("@")
    with answers(model, "downloading"):
        for file in WEIGHTS_FILES:
            wanted = [*_DESCRIPTIONS, file]
            folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
            if (folder / file).is_file():
                return folder
    raise UserError(f"{model}: its repository holds no {' and no '.join(WEIGHTS_FILES)}")


def check_push(repository: str) -> None:
    """Asked before the work: raises UserError for a name that no repository can have, RunError without a token."""
    with answers(repository, "pushing"):
        validate_repo_id(repository)
    if get_token() is None:
        raise RunError(f"pushing to {repository} needs a token of the hub: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str) -> str:
    """Upload a folder as one commit of the model `repository`, which is made if it is not there; returns its address.

    Raises UserError for a name or a model card that the hub does not take, RunError when it refuses the login or is out
    of reach.
    """
    api = HfApi(library_name="ssl-vit")
    with answers(repository, "pushing"):
        made = api.create_repo(repository, exist_ok=True)
        try:
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Export from ssl-vit")
        except ValueError as error:  # the hub reads the model card's front matter first
            raise UserError(f"{repository}: {' '.join(str(error).split())}") from None
    return str(made)


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
