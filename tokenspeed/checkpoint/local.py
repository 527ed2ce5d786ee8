"""Looks into a folder or file for a model's parts. Reads names and the shard index, never a weight."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.protocol.errors import CheckpointError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: cannot be read, is not JSON, or is not an object.
    """
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def local_checkpoint(name: str, path: Path, load_format: str) -> Checkpoint:
    """The model in an existing folder or file.

    Raises:
        CheckpointError: nothing usable there, several candidates, or a missing part; names what was found.
    """
    if load_format == "dummy":
        return _config_only(name, path)
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: expected a folder with {CONFIG_FILE} and safetensors, or a .gguf file")
        return gguf_checkpoint(name, path)
    has_safetensors = any(path.glob("*.safetensors")) or (path / INDEX_FILE).exists()
    if load_format == "safetensors" or (load_format == "auto" and has_safetensors):
        return _safetensors(name, path)
    found = sorted(file for file in path.glob("*.gguf") if _part_number(file) <= 1)
    if len(found) == 1:
        return gguf_checkpoint(name, found[0])
    if found:
        raise CheckpointError(
            f"{path} holds several GGUF files: {', '.join(file.name for file in found)}. Name one of them: {found[0]}"
        )
    raise CheckpointError(_nothing_found(path, load_format))


def gguf_checkpoint(name: str, path: Path) -> Checkpoint:
    """One .gguf file, or all parts of a split one (`x-00001-of-00003.gguf`), whichever part `path` names."""
    match = _GGUF_PART.fullmatch(path.name)
    parts = [path]
    if match is not None:
        total = int(match["total"])
        parts = [path.with_name(f"{match['stem']}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1)]
        _require_all(parts, f"{path.name} is one of {total} parts")
    return Checkpoint(
        name=name,
        format="gguf",
        config_path=str(parts[0]),
        weight_files=tuple(str(part) for part in parts),
        tokenizer_path=str(parts[0]),
    )


def _config_only(name: str, path: Path) -> Checkpoint:
    config = path / CONFIG_FILE if path.is_dir() else path
    if not config.is_file() or config.suffix not in (".json", ".gguf"):
        raise CheckpointError(f"{config}: load format dummy needs a {CONFIG_FILE} (or a .json or .gguf file)")
    tokenizer = config if config.suffix == ".gguf" else config.parent
    return Checkpoint(
        name=name, format="config", config_path=str(config), weight_files=(), tokenizer_path=str(tokenizer)
    )


def _safetensors(name: str, folder: Path) -> Checkpoint:
    config = folder / CONFIG_FILE
    if not config.is_file():
        adapter = "; it looks like a LoRA adapter" if (folder / "adapter_config.json").exists() else ""
        raise CheckpointError(f"{folder}: {CONFIG_FILE} is missing{adapter}")
    if (folder / INDEX_FILE).is_file():
        files = _indexed(folder)
    elif (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    else:
        files = _unindexed(folder)
    return Checkpoint(
        name=name,
        format="safetensors",
        config_path=str(config),
        weight_files=tuple(str(file) for file in files),
        tokenizer_path=str(folder),
    )


def _indexed(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: `weight_map` is {weight_map!r}, expected an object of tensor name to file name"
        )
    names: set[str] = set()
    for tensor, file in weight_map.items():
        # A name with a folder in it could point anywhere on the disk.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {tensor!r} is said to lie in {file!r}, expected the plain name of a .safetensors file"
            )
        names.add(file)
    files = [folder / file for file in sorted(names)]
    _require_all(files, f"{index.name} names {len(files)} shards")
    return files


def _unindexed(folder: Path) -> list[Path]:
    """Without an index: the only safetensors file, or a complete numbered set."""
    found = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not found:
        raise CheckpointError(_nothing_found(folder, "safetensors"))
    match = _SHARD.fullmatch(found[0].name)
    if match is not None:
        total = int(match["total"])
        files = [folder / f"{match['stem']}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
        _require_all(files, f"{found[0].name} is one of {total} shards")
        return files
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds several safetensors files and no {INDEX_FILE}: {', '.join(file.name for file in found)}; "
            f"expected {SINGLE_FILE}, or shards with their index"
        )
    return found


def _require_all(files: list[Path], why: str) -> None:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(
            f"{files[0].parent}: {why}, but {', '.join(missing[:5])}{more} is missing; finish the download"
        )


def _part_number(file: Path) -> int:
    """1 for the first part of a split file, 0 for a file of its own."""
    match = _GGUF_PART.fullmatch(file.name)
    return int(match["number"]) if match else 0


def _nothing_found(folder: Path, load_format: str) -> str:
    expected = {
        "auto": f"{CONFIG_FILE} with {SINGLE_FILE} (or shards with {INDEX_FILE}), or one .gguf file",
        "safetensors": f"{SINGLE_FILE} or shards with {INDEX_FILE}",
        "gguf": "one .gguf file",
    }[load_format]
    pickles = sorted(file.name for file in folder.glob("*.bin"))[:3]
    if pickles:
        return (
            f"{folder}: found {', '.join(pickles)}, expected {expected}. Pickled weights can run code and "
            "are not read: convert them to safetensors (save_pretrained of transformers 5 does)"
        )
    names = sorted(file.name for file in folder.iterdir())[:8]
    return f"{folder}: expected {expected}; found {', '.join(names) if names else 'an empty folder'}"
