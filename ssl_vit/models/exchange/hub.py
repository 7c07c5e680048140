"""Weights from and to the Hugging Face hub, and what the hub's errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, errors, get_token, snapshot_download
from huggingface_hub.utils import validate_repo_id

from ssl_vit.interfaces import RunError, UserError

WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")  # best first


@contextmanager
def hub_errors(model: str, doing: str) -> Iterator[None]:
    """Raise UserError for what the hub refuses and RunError for a hub out of reach."""
    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise RunError(f"{model}: {doing} needs the hub, which does not answer: {_first(error)}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise UserError(f"{model}: no such model, or no access to it (try `hf auth login`): {_first(error)}") from None
    except errors.HFValidationError as error:
        raise UserError(f"{model}: {_first(error)}") from None
    except (OSError, errors.HTTPError) as error:
        raise RunError(f"{model}: {doing} failed: {_first(error)}") from error


def download(model: str) -> Path:
    """A folder with the description and the weights of `ID` or `ID@REVISION`, in safetensors if possible.

    Raises UserError for a model that does not exist, RunError when the hub is out of reach.
    """
    repository, _, revision = model.partition("@")
    with hub_errors(model, "downloading"):
        for file in WEIGHTS_FILES:
            wanted = ["config.json", "preprocessor_config.json", file]
            folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
            if (folder / file).is_file():
                return folder
    raise UserError(f"{model}: its repository holds no {' and no '.join(WEIGHTS_FILES)}")


def check_push(repository: str) -> None:
    """Before any work: raises UserError for an invalid repository name, RunError without a token."""
    with hub_errors(repository, "pushing"):
        validate_repo_id(repository)
    if get_token() is None:
        raise RunError(f"pushing to {repository} needs a token of the hub: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str) -> str:
    """Upload a folder as one commit of the model `repository` (created if needed); returns its address.

    Raises UserError for a name or a model card that the hub refuses, RunError for a refused login or no connection.
    """
    api = HfApi(library_name="ssl-vit")
    with hub_errors(repository, "pushing"):
        created = api.create_repo(repository, exist_ok=True)
        try:
            api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Export from ssl-vit")
        except ValueError as error:  # the hub reads the model card's front matter first
            raise UserError(f"{repository}: {' '.join(str(error).split())}") from None
    return str(created)


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
