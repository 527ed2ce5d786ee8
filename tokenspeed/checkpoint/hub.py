"""The one place that talks to the model hub, through `huggingface_hub`; without network its cache serves."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from tokenspeed.protocol.errors import CheckpointError

CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def split_hub_name(name: str) -> tuple[str, str | None] | None:
    """`org/name`, `org/name:file.gguf` or `org/name/file.gguf` -> (repository, file or None); else None."""
    repo, colon, file = name.partition(":")
    if not colon and name.count("/") >= 2 and name.endswith(".gguf"):
        org, base, file = name.split("/", 2)
        repo = f"{org}/{base}"
    if _REPO.fullmatch(repo) is None or (colon and not file):
        return None
    return repo, file or None


def download(
    repo: str, patterns: tuple[str, ...], revision: str | None, cache_dir: str | None, top_level: bool
) -> Path:
    """Bring the files of `repo` that match `patterns` into the hub cache and return the snapshot's folder.

    Args:
        patterns: file patterns in the repository.
        cache_dir: where to keep it; None = the hub's own default (HF_HOME).
        top_level: leave out files in subfolders (original weights in another layout).

    Raises:
        CheckpointError: unknown repository or revision, no permission, or no network and not cached; says what to do.
    """
    wanted = repo if revision is None else f"{repo} at revision {revision}"
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(patterns),
                ignore_patterns=["*/*"] if top_level else None,
            )
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{wanted}: the hub asks for permission. Accept its licence on the model's page, then run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{wanted}: the repository exists, this revision does not; check --revision") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo}: neither a folder or file here nor a repository of the hub. Check the spelling; "
            "for a private repository run `hf auth login`"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{wanted}: not in the local hub cache, and the hub cannot be reached ({_first_line(error)}). "
            f"Connect once, or download it elsewhere (`hf download {repo}`) and give the folder: "
            "`tokenspeed serve /path/to/folder`"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
