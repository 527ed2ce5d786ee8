"""Finds a model's tokenizer and chat templates in its files: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.gguf_file import read_gguf
from tokenspeed.config.model import ModelConfig
from tokenspeed.protocol.echo import echo
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.text.codec import Tokenizer
from tokenspeed.text.gguf_tokenizer import build_gguf_tokenizer, set_bos_eos
from tokenspeed.text.remote_tokenizer import load_remote_backend

__all__ = ["Tokenizer", "load_tokenizer", "read_chat_templates"]

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(
    checkpoint: Checkpoint | str | Path, model: ModelConfig | None, trust_remote_code: bool = False
) -> Tokenizer:
    """The tokenizer of a model, with the chat templates found beside it.

    Args:
        checkpoint: a resolved checkpoint, or the tokenizer's folder or .gguf file.
        model: whose logits are decoded; None for a client, which has none.
        trust_remote_code: may run Python code that comes with the model.

    Raises:
        CheckpointError: no tokenizer there, a damaged one, one of an unknown kind, or one that is code and not trusted.
    """
    path = Path(checkpoint.tokenizer_path if isinstance(checkpoint, Checkpoint) else checkpoint)
    if path.is_file():
        metadata = read_gguf(path).metadata
        backend, special_tokens = build_gguf_tokenizer(metadata, str(path))
        templates = _gguf_templates(metadata)
    else:
        config = _json_object(path / "tokenizer_config.json")
        backend = _folder_backend(path, config, trust_remote_code)
        special_tokens = _special_tokens(path, config)
        _apply_config(backend, config, special_tokens)
        templates = _folder_templates(path, config)
    return Tokenizer(
        backend,
        vocab_size=backend.get_vocab_size() if model is None else model.vocab_size,
        special_tokens=special_tokens,
        chat_templates=templates,
        origin=str(path),
    )


def read_chat_templates(place: str | Path) -> dict[str, str]:
    """The chat templates beside a tokenizer, a folder or a .gguf file: Jinja text by name, `default` the usual one.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    path = Path(place)
    if path.is_file():
        return _gguf_templates(read_gguf(path).metadata)
    return _folder_templates(path, _json_object(path / "tokenizer_config.json"))


def _folder_backend(path: Path, config: dict[str, Any], trust_remote_code: bool) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer that this version can read: {error}") from error
    if "AutoTokenizer" in (config.get("auto_map") or ()):
        if not trust_remote_code:
            raise CheckpointError(
                f"{path}: the tokenizer is Python code that comes with the model; read it, "
                "then pass --trust-remote-code"
            )
        return load_remote_backend(path)
    raise CheckpointError(
        f"{path}: no tokenizer.json; save one with transformers' save_pretrained, or pass --tokenizer with a folder "
        "that has one"
    )


def _apply_config(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """What tokenizer_config.json adds to tokenizer.json: further added tokens, and bos and eos around a text."""
    for token_id, entry in _declared_tokens(config):
        if token_id not in backend.get_added_tokens_decoder():
            flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            token = AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        bos = special_tokens.get("bos_token") if config.get("add_bos_token") else None
        eos = special_tokens.get("eos_token") if config.get("add_eos_token") else None
        set_bos_eos(backend, bos, eos)


def _declared_tokens(config: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Further tokens by id, least first.

    Raises:
        CheckpointError: an entry that is none.
    """
    declared = config.get("added_tokens_decoder") or {}
    found: list[tuple[int, dict[str, Any]]] = []
    for key, entry in declared.items() if isinstance(declared, dict) else [(declared, None)]:
        if not (str(key).isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder holds {echo(key)}: {echo(entry)}; each entry is an id "
                "with an object that has a content; download it again"
            )
        found.append((int(key), entry))
    return sorted(found, key=lambda item: item[0])


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Roles to spellings. tokenizer_config.json wins over special_tokens_map.json, as in transformers."""
    found: dict[str, str] = {}
    for source in (_json_object(path / "special_tokens_map.json"), config):
        for role in _ROLES:
            value = source.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[role] = value
    return found


def _folder_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """`chat_template.jinja` (and `additional_chat_templates/`) win over the entry of tokenizer_config.json."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates.update((item["name"], item["template"]) for item in entry if _is_named(item))
    elif isinstance(entry, dict):
        templates.update((name, text) for name, text in entry.items() if isinstance(text, str))
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _text(file)
    single = path / "chat_template.jinja"
    if single.is_file():
        templates["default"] = _text(single)
    return templates


def _is_named(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8 text at byte {error.start}; download it again") from error


def _gguf_templates(metadata: dict[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = {"default": metadata[key]} if isinstance(metadata.get(key), str) else {}
    for name, value in metadata.items():
        if name.startswith(f"{key}.") and isinstance(value, str):
            templates[name[len(key) + 1 :]] = value
    return templates


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
