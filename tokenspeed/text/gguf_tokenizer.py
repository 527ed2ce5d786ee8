"""Builds a `tokenizers` backend from the metadata of a GGUF file.

Knows the two kinds of vocabulary that llama and qwen files carry: `gpt2` (byte-level BPE with merges, cut beforehand
by a regular expression that `tokenizer.ggml.pre` names) and `llama` (SentencePiece BPE, whose merges follow from the
scores). The expressions are the models' published ones; a name that is not known is an error, because a near miss
tokenizes almost right and nobody notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.text.codec import SPACE_MARK

# Values of tokenizer.ggml.token_type (GGUF specification).
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"

_LLAMA3 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"

_PRE: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    # What the file format's own reader does when a file names no pre-tokenizer.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3")  # a whole word that is an entry is that entry, merges or not
_NFC = ("qwen2",)

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_gguf_tokenizer(metadata: Mapping[str, Any], origin: str) -> tuple[Tokenizer, dict[str, str]]:
    """The backend, and the special tokens by role (`bos_token`, ...).

    Raises:
        CheckpointError: no or damaged vocabulary, or an unknown tokenizer model or pre-tokenizer (named).
    """
    tokens = _list(metadata, "tokenizer.ggml.tokens", origin)
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{origin}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level_bpe(metadata, tokens, origin)
    elif kind == "llama":
        backend = _sentencepiece_bpe(metadata, tokens, types, origin)
    else:
        raise CheckpointError(f"{origin}: tokenizer.ggml.model is {kind!r}; gpt2 and llama are supported")
    added = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=added[token_type], normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in added
        ]
    )
    special_tokens = _special_tokens(metadata, tokens)
    _add_post_processor(backend, metadata, special_tokens)
    return backend, special_tokens


def _list(metadata: Mapping[str, Any], key: str, origin: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{origin}: no {key} in the file's metadata; pass --tokenizer with a tokenizer folder")
    return value


def _vocabulary(tokens: list[str], origin: str) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise CheckpointError(f"{origin}: tokenizer.ggml.tokens holds {twice!r} twice")
    return vocabulary


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], origin: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise CheckpointError(
            f"{origin}: tokenizer.ggml.pre is {pre!r}, which is not known here ({', '.join(sorted(_PRE))} are); "
            "pass --tokenizer with the model's tokenizer folder"
        )
    merges = []
    for merge in _list(metadata, "tokenizer.ggml.merges", origin):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise CheckpointError(f"{origin}: tokenizer.ggml.merges holds {merge!r}, which is not a pair")
        merges.append((left, right))
    try:
        model = models.BPE(_vocabulary(tokens, origin), merges, ignore_merges=pre in _IGNORE_MERGES)
    except Exception as error:  # the library raises bare Exception for a merge of unknown pieces
        raise CheckpointError(f"{origin}: tokenizer.ggml.merges does not fit the tokens: {error}") from error
    backend = Tokenizer(model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _PRE[pre]]
    add_prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int], origin: str) -> Tokenizer:
    scores = _list(metadata, "tokenizer.ggml.scores", origin)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{origin}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocabulary = _vocabulary(tokens, origin)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocabulary,
        _merges_from_scores(tokens, scores, types, vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    backend = Tokenizer(model)
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), replace]) if prefix_space else replace
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours make the best-scored piece: every cut of every piece into two pieces,
    best score first. Control tokens are left out: text must not merge into one."""
    text_ids = {index for index, kind in enumerate(types) if kind not in (_CONTROL, _UNKNOWN, _BYTE)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for index in text_ids:
        piece = tokens[index]
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left in text_ids and right in text_ids and left is not None and right is not None:
                ranked.append((-scores[index], left, right, piece[:cut], piece[cut:]))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    found = {}
    for role, key in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[role] = tokens[token_id]
    return found


def _add_post_processor(backend: Tokenizer, metadata: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """bos in front and eos behind, as the file says; SentencePiece and Llama 3 files that say nothing mean bos."""
    default_bos = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _IGNORE_MERGES
    )
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    set_bos_eos(
        backend, special_tokens.get("bos_token") if add_bos else None, add_eos and special_tokens.get("eos_token")
    )


def set_bos_eos(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode(add_special_tokens=True)` put these tokens around the text; None or empty = not."""
    around = [token for token in (bos, eos) if token]
    template = [f"{bos}:0"] if bos else []
    template += ["$A:0"] + ([f"{eos}:0"] if eos else [])
    backend.post_processor = processors.TemplateProcessing(
        single=template,
        pair=[*template, "$B:1"],
        special_tokens=[(t, backend.token_to_id(t)) for t in dict.fromkeys(around)],
    )
