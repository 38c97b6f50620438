"""Models by their id on a Hugging Face hub: `org/name` or `org/name@revision`.

Files go through the hub's own library into its own cache: what other tools have downloaded is there already, an
interrupted download goes on where it stopped, and without a network the cache serves. `HF_TOKEN`, `HF_HOME`,
`HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what they mean everywhere.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from strata.errors import ModelError

WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)
"""What is read of a model. Folders often hold the same weights again in other formats."""

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"(?P<repository>{_PART}/{_PART})(@(?P<revision>[\w./-]+))?")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubId:
    """A model on a hub; ``revision`` is a branch, a tag or a commit, or None for the newest."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_hub_id(name: str) -> HubId | None:
    """The hub id that a name may be, or None if it can only be a path."""
    found = _HUB_ID.fullmatch(name)
    if found is None or name.endswith(".gguf"):
        return None
    return HubId(found["repository"], found["revision"])


def fetch_from_hub(wanted: HubId) -> Path:
    """The model's folder in the hub's cache, downloaded as far as it is not there. Raises `ModelError`."""
    log.info("looking for %s on the hub %s", wanted, constants.ENDPOINT)
    try:
        folder = snapshot_download(
            wanted.repository, revision=wanted.revision, allow_patterns=list(WANTED), library_name="strata"
        )
    except Exception as error:  # the library passes on whatever its HTTP client raises
        raise ModelError(_words(wanted, error)) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"--model {wanted}: what the hub holds under this name has no config.json; name a model with "
            "safetensors weights, or download its .gguf file and give --model that"
        )
    return Path(folder)


def _words(wanted: HubId, error: Exception) -> str:
    hub = constants.ENDPOINT
    name = f"--model {wanted}"
    if isinstance(error, GatedRepoError):
        return (
            f"{name}: the model is gated: accept its terms at {hub}/{wanted.repository}, then set HF_TOKEN to a "
            "token of the account that did"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{name}: there is no folder of this name here, and the hub {hub} knows no such model, or shows it to "
            "its owners alone: check the spelling, or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name}: the model has no revision {wanted.revision or 'main'!r}; name a branch, a tag or a commit"
    if isinstance(error, LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub {hub} cannot be reached"
        return (
            f"{name}: there is no folder of this name here, {why}, and the hub's cache {constants.HF_HUB_CACHE} "
            "does not hold the whole model: download it where there is a network, or give --model a folder"
        )
    if isinstance(error, HFValidationError):
        return f"{name} is neither a folder nor a valid name on the hub: {error}"
    return (
        f"{name} could not be downloaded from {hub}: {type(error).__name__}: {error}; what has come is kept, start "
        "again to go on"
    )
