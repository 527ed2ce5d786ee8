"""From what a user typed to a `Checkpoint` whose files exist. Downloads what is missing; reads no weights."""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.embedded import DEFAULT_MODEL, cache_folder, fetch_embedded
from tokenspeed.checkpoint.hub import CONFIG_FILES, WEIGHT_FILES, download, split_hub_name
from tokenspeed.checkpoint.local import local_checkpoint
from tokenspeed.protocol.errors import CheckpointError, ConfigError

DEFAULT_NAME = "default"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def resolve_checkpoint(
    model: str | None, *, revision: str | None = None, download_dir: str | None = None, load_format: str = "auto"
) -> Checkpoint:
    """Find (and download, where needed) a model.

    Args:
        model: None or `default` for the embedded model; a folder with config.json and safetensors or one .gguf; a
            .gguf file; a hub repository `org/name`; a file of one, `org/name:file.gguf`. An existing path wins over
            a hub repository of the same name.
        revision: branch, tag or commit of a hub repository.
        download_dir: where downloads are kept, instead of the default caches.
        load_format: auto, safetensors, gguf, or dummy (random weights; only the config is needed).

    Raises:
        ConfigError: an argument that cannot be used with this model.
        CheckpointError: not found, incomplete, or cannot be downloaded; says what to do.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r} is not supported; choose one of {', '.join(LOAD_FORMATS)}")
    if model is None or model == DEFAULT_NAME:
        _refuse_revision(revision, "the default model")
        if load_format == "safetensors":
            raise ConfigError("the default model is a GGUF file; load format safetensors cannot read it (use auto)")
        folder = Path(download_dir).expanduser() if download_dir else cache_folder(os.environ)
        return local_checkpoint(DEFAULT_NAME, fetch_embedded(DEFAULT_MODEL, folder), load_format)
    path = Path(model).expanduser()
    if path.exists():
        _refuse_revision(revision, f"{path}, which is a local path")
        if path.suffix == ".gguf" and path.is_file() and load_format == "safetensors":
            raise ConfigError(f"{path} is a GGUF file; load format safetensors cannot read it (use auto)")
        return local_checkpoint(model, path, load_format)
    return _from_hub(model, revision, download_dir, load_format)


def resolve_tokenizer(tokenizer: str, *, revision: str | None = None, download_dir: str | None = None) -> str:
    """Find (and download, where needed) a tokenizer of its own: `Checkpoint.tokenizer_path` for a name as above.

    A folder needs tokenizer files, not a model: no config.json, no weights.

    Raises:
        ConfigError, CheckpointError: as `resolve_checkpoint`.
    """
    path = Path(tokenizer).expanduser()
    if tokenizer == DEFAULT_NAME or path.suffix == ".gguf":
        return resolve_checkpoint(tokenizer, revision=revision, download_dir=download_dir).tokenizer_path
    if path.is_dir():
        _refuse_revision(revision, f"{path}, which is a local path")
        return str(path)
    parsed = None if _looks_local(tokenizer) else split_hub_name(tokenizer)
    if parsed is None:
        raise CheckpointError(
            f"tokenizer {tokenizer!r} is not a folder here (looked for {path.absolute()}), a .gguf file or "
            "a hub repository"
        )
    repo, file = parsed
    if file is not None:
        return resolve_checkpoint(tokenizer, revision=revision, download_dir=download_dir).tokenizer_path
    return str(download(repo, CONFIG_FILES, revision, download_dir, top_level=True))


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision {revision!r} applies to hub repositories, not to {what}; leave it out")


def _from_hub(model: str, revision: str | None, download_dir: str | None, load_format: str) -> Checkpoint:
    parsed = None if _looks_local(model) else split_hub_name(model)
    if parsed is None:
        raise CheckpointError(
            f"{model!r} does not exist here (looked for {Path(model).expanduser().absolute()}). A model is a folder, a "
            f".gguf file, a hub repository `org/name` or `org/name:file.gguf`, or `{DEFAULT_NAME}`"
        )
    repo, file = parsed
    if file is None:
        if load_format == "gguf":
            raise ConfigError(f"load format gguf with a hub repository needs the file's name: `{repo}:FILE.gguf`")
        patterns = CONFIG_FILES if load_format == "dummy" else CONFIG_FILES + WEIGHT_FILES
        folder = download(repo, patterns, revision, download_dir, top_level=True)
        # A repository of GGUF files only: which of them is the user's choice, each may be tens of gigabytes.
        if load_format != "dummy" and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
            raise CheckpointError(
                f"{repo} has no safetensors files. If it holds GGUF files, name one: `{repo}:FILE.gguf`; "
                "pickled weights (.bin, .pt) are not read"
            )
        return local_checkpoint(model, folder, load_format)
    if not file.endswith(".gguf"):
        raise CheckpointError(f"{model!r}: after the colon a .gguf file of {repo} is expected, found {file!r}")
    # `x-00001-of-00003.gguf`: all parts are wanted, whichever one was named.
    stem = file.rsplit("-of-", 1)
    pattern = f"{stem[0].rsplit('-', 1)[0]}-*-of-{stem[1]}" if len(stem) == 2 else file
    folder = download(repo, (pattern,), revision, download_dir, top_level=False)
    if not (folder / file).is_file():
        raise CheckpointError(f"{repo} has no file {file!r} (or it is not in the local cache and there is no network)")
    return local_checkpoint(model, folder / file, load_format)


def _looks_local(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith((".json", ".safetensors")) or "\\" in model
