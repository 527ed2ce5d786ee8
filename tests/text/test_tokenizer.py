from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_reference import GOLDEN as SENTENCEPIECE_GOLDEN
from smollm_reference import GOLDEN, Reference
from text_models import model_config
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.gguf_file import read_gguf
from tokenspeed.protocol.errors import CheckpointError, InvalidRequest
from tokenspeed.text.codec import Tokenizer, byte_level_alphabet
from tokenspeed.text.gguf_tokenizer import build_gguf_tokenizer
from tokenspeed.text.tokenizer import load_tokenizer

CASES = json.loads(GOLDEN.read_text())
SPM = json.loads(SENTENCEPIECE_GOLDEN.read_text())

nasty_text = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("<|im_endstar>19 \n\t'sé日😀\u200d\u0301"))
)


@pytest.fixture(scope="module")
def reference(default_checkpoint: Checkpoint) -> Reference:
    metadata = read_gguf(default_checkpoint.tokenizer_path).metadata
    return Reference(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"])


@pytest.mark.parametrize("case", CASES, ids=[repr(case["text"][:12]) for case in CASES])
def test_golden(smollm: Tokenizer, case: dict[str, Any]) -> None:
    ids = smollm.encode(case["text"])
    assert ids == case["ids"]
    assert smollm.decode(ids) == case["text"]
    assert b"".join(map(smollm.token_bytes, ids)) == case["text"].encode()


@settings(max_examples=150, deadline=None)
@given(text=nasty_text)
def test_any_text_equals_the_reference(smollm: Tokenizer, reference: Reference, text: str) -> None:
    ids = smollm.encode(text)
    assert ids == reference.encode(text)
    assert smollm.decode(ids) == reference.decode(ids).decode("utf-8", "replace")
    assert smollm.special_ids.isdisjoint(ids)


def test_special_tokens_only_where_asked(smollm: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    assert smollm.encode(text, parse_special=True) == [1, *smollm.encode("user\nhi"), 2]
    assert smollm.special_ids.isdisjoint(smollm.encode(text))
    assert smollm.decode([1, 2, *smollm.encode("hi")]) == "hi"
    assert smollm.decode([1, 2, *smollm.encode("hi")], skip_special_tokens=False) == "<|im_start|><|im_end|>hi"
    assert smollm.token_bytes(2) == b"<|im_end|>"


def test_rendered_text_mixes_both(smollm: Tokenizer) -> None:
    marked = "<|im_start|>user\n1<\ufdd2|im_end|>2<|im_end|>"
    assert smollm.encode_rendered(marked, "\ufdd2") == [1, *smollm.encode("user\n1<|im_end|>2"), 2]
    plain = "<|im_start|>user\nhi<|im_end|>"
    assert smollm.encode_rendered(plain, "\ufdd2") == smollm.encode(plain, parse_special=True)


def test_lone_surrogate_is_the_requests_fault(smollm: Tokenizer) -> None:
    for parse_special in (False, True):
        with pytest.raises(InvalidRequest, match=r"lone surrogate \(U\+D83D\) at character 2"):
            smollm.encode("ab\ud83d", parse_special=parse_special)


def test_padding_ids_are_empty_and_negative_ones_refused(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49160
    assert smollm.token_bytes(49155) == b"" and smollm.token_bytes(10**9) == b""
    assert smollm.decode([49155, *smollm.encode("x"), 60000]) == "x"
    with pytest.raises(InvalidRequest, match="-1 is negative"):
        smollm.decode([-1])


def test_long_text(smollm: Tokenizer) -> None:
    text = ("lorem ipsum 123 日本 😀\n" * 5000)[:100_000]
    assert smollm.decode(smollm.encode(text)) == text
    assert smollm.decode(smollm.encode("x" * 100_000)) == "x" * 100_000


def test_a_long_text_leaves_other_threads_running(smollm: Tokenizer) -> None:
    """`tokenizers.Tokenizer.encode` holds the interpreter lock: one prompt of 10 MB stopped the server for 8 s."""
    encoding = threading.Thread(target=smollm.encode, args=("word " * 100_000,))
    encoding.start()
    num_turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10  # one or two while the lock was held


def test_threads_agree(default_checkpoint: Checkpoint, smollm: Tokenizer) -> None:
    """A fresh tokenizer, whose lazy tables are filled by eight threads at once."""
    fresh = load_tokenizer(default_checkpoint, model_config(49152))

    def work(_: int) -> list[tuple[list[int], list[int], str]]:
        return [
            (fresh.encode(c["text"]), fresh.encode_rendered(c["text"] + "\ufdd2", "\ufdd2"), fresh.decode(c["ids"]))
            for c in CASES
        ]

    want = [(c["ids"], smollm.encode_rendered(c["text"] + "\ufdd2", "\ufdd2"), c["text"]) for c in CASES]
    with ThreadPoolExecutor(8) as pool:
        assert all(got == want for got in pool.map(work, range(16)))


def test_special_tokens_and_template_come_from_the_file(smollm: Tokenizer) -> None:
    assert smollm.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert list(smollm.chat_templates) == ["default"]
    assert smollm.encode("x", add_special_tokens=True) == smollm.encode("x", add_special_tokens=False)


@pytest.mark.parametrize("case", SPM["cases"], ids=[repr(case["text"]) for case in SPM["cases"]])
def test_sentencepiece_golden(sentencepiece: Tokenizer, case: dict[str, Any]) -> None:
    assert sentencepiece.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert sentencepiece.encode(case["text"]) == [1, *case["ids"]]
    assert sentencepiece.decode([1, *case["ids"], 2]) == case["text"]
    assert sentencepiece.token_bytes(case["ids"][0])[:1] in (b" ", b"")


def test_sentencepiece_special_and_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("<s>the</s>", parse_special=True)
    assert ids[:2] == [1, 1] and ids[-1] == 2
    assert sentencepiece.token_bytes(3 + 0x0A) == b"\n"
    assert sentencepiece.decode([3 + 0xE6, 3 + 0x97, 3 + 0xA5]) == "日"
    assert sentencepiece.decode([3 + 0xE6, 3 + 0x97]) == "\ufffd"


def test_no_text_becomes_a_control_token_even_if_merges_spell_it() -> None:
    """`<s>` can be merged from its letters here; only a cut inside keeps it text."""
    vocab = {letter: index for index, letter in enumerate(byte_level_alphabet())}
    vocab |= {"<s": 256, "<s>": 257}
    backend = Backend(models.BPE(vocab, [("<", "s"), ("<s", ">")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer = Tokenizer(backend, vocab_size=258, special_tokens={}, chat_templates={}, origin="test")
    ids = tokenizer.encode("a<s>b")
    assert 257 not in ids and tokenizer.decode(ids) == "a<s>b"
    assert tokenizer.encode("a<s>b", parse_special=True)[1] == 257


def test_unknown_kinds_are_named() -> None:
    tokens = byte_level_alphabet()
    base = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    with pytest.raises(CheckpointError, match="'viking'"):
        build_gguf_tokenizer(base | {"tokenizer.ggml.pre": "viking"}, "m.gguf")
    with pytest.raises(CheckpointError, match="'t5'"):
        build_gguf_tokenizer(base | {"tokenizer.ggml.model": "t5"}, "m.gguf")
    with pytest.raises(CheckpointError, match=r"merges does not fit"):
        build_gguf_tokenizer(base, "m.gguf")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.tokens"):
        build_gguf_tokenizer({"tokenizer.ggml.model": "gpt2"}, "m.gguf")
    with pytest.raises(CheckpointError, match="'!' twice"):
        build_gguf_tokenizer(base | {"tokenizer.ggml.tokens": [*tokens, "!"]}, "m.gguf")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'M 1234 x", ["I", "'", "M", " 1234", " x"]),
        ("smollm", "a 1234 x", ["a", " ", "1", "2", "3", "4", " x"]),
        ("llama-bpe", "I'M 1234\n x", ["I", "'M", " ", "123", "4", "\n", " x"]),
        ("qwen2", "a 1234 !!\n\n", ["a", " ", "1", "2", "3", "4", " !!\n\n"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_cut_as_published(pre: str, text: str, pieces: list[str]) -> None:
    tokens = [*byte_level_alphabet(), "ab"]
    backend, _ = build_gguf_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": ["a b"],
        },
        "m.gguf",
    )
    cut = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


@pytest.fixture
def folder(tmp_path: Path, smollm: Tokenizer) -> Path:
    smollm._parsing.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_hugging_face_folder(folder: Path, smollm: Tokenizer) -> None:
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "added_tokens_decoder": {"49152": {"content": "<new>", "special": True}},
        "chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("new")
    tokenizer = load_tokenizer(folder, model_config(49153))
    assert tokenizer.encode("hi") == [1, *smollm.encode("hi")]
    assert tokenizer.encode("<new>", add_special_tokens=False, parse_special=True) == [49152]
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_templates == {"default": "new", "tool_use": "tools"}


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path, model_config(8))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.X", None]}}))
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_tokenizer(tmp_path, model_config(8))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_tokenizer(tmp_path, model_config(8))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path, model_config(8))
    Backend(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decoder none is not supported"):
        load_tokenizer(tmp_path, model_config(8))


REMOTE_CODE = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, **kwargs):
        super().__init__(tokenizer_file=__FILE__, **kwargs)
"""


def test_remote_code_runs_only_when_trusted(folder: Path, smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
    hidden = folder / "vocabulary.bin"
    (folder / "tokenizer.json").rename(hidden)
    (folder / "own.py").write_text(REMOTE_CODE.replace("__FILE__", repr(str(hidden))))
    config = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_tokenizer(folder, model_config(49152))
    tokenizer = load_tokenizer(folder, model_config(49152), trust_remote_code=True)
    assert tokenizer.encode("hi there") == smollm.encode("hi there")


TIKTOKEN_CODE = """
import base64
import os
import tiktoken
try:
    from transformers.tokenization_python import PythonBackend as Base
except ImportError:
    from transformers import PreTrainedTokenizer as Base

class TikTokenTokenizer(Base):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        lines = open(vocab_file, "rb").read().split(b"\\n")
        ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
        special = {spelling: len(ranks) + place for place, spelling in enumerate(("[BOS]", "<|im_end|>", "<|x|>"))}
        self.model = tiktoken.Encoding("own", pat_str=__PATTERN__, mergeable_ranks=ranks, special_tokens=special)
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {self._convert_id_to_token(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text, **kwargs):
        return [self._convert_id_to_token(i) for i in self.model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self.model._special_tokens.get(token, 0)

    def _convert_id_to_token(self, index):
        return str(index)
"""

# As in Kimi's own file: intersections of classes, Han apart from other letters.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def test_a_tiktoken_vocabulary_in_python_code_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: Kimi's tokenizer, which is only Python code around a tiktoken file, could not be loaded at all."""
    tiktoken = pytest.importorskip("tiktoken")
    words = [
        b"Hello",
        b"He",
        b"ll",
        b"llo",
        b" w",
        b"or",
        b" wor",
        b"ld",
        b" world",
        "北".encode(),
        "京".encode(),
        b"  ",
    ]
    words += [b"Hell", "北京".encode(), "北".encode()[:2], b"in", b"ing", b" say", b" sa", b"12", b"123", b"\n\n"]
    tokens = [bytes([byte]) for byte in range(256)] + sorted(words, key=len)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    (tmp_path / "own.py").write_text(TIKTOKEN_CODE.replace("__PATTERN__", repr(KIMI_PATTERN)))
    config = {"auto_map": {"AutoTokenizer": ["own.TikTokenTokenizer", None]}, "tokenizer_class": "TikTokenTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "[BOS]"}))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_tokenizer(tmp_path, model_config(300))
    tokenizer = load_tokenizer(tmp_path, model_config(300), trust_remote_code=True)
    special = {spelling: len(ranks) + place for place, spelling in enumerate(("[BOS]", "<|im_end|>", "<|x|>"))}
    peer = tiktoken.Encoding("peer", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    for text in ("Hello world, 12345 sayings", "北京 Hello\n\n  <|im_end|>", "Ünï é 👩‍👩‍👧"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == peer.encode(text, disallowed_special=()) and tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_end|>", False, parse_special=True) == [special["<|im_end|>"]]
    assert tokenizer.special_ids == frozenset(special.values())


def test_room_never_imports_torch() -> None:
    code = (
        "import sys, tokenspeed.text.tokenizer, tokenspeed.text.chat_template, tokenspeed.text.detokenizer, "
        "tokenspeed.text.stop; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", b"\xff\xfe", "not UTF-8 text at byte 0"),
        ("additional_chat_templates/rag.jinja", b"{{ \xff }}", "not UTF-8 text at byte 3"),
        ("tokenizer_config.json", b'{"a": "\xff"}', "not UTF-8 text at byte 7"),
        ("tokenizer_config.json", b"[" * 100_000, "not valid JSON"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"a": {"content": "x"}}}',
            "added_tokens_decoder holds 'a'",
        ),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"5": {}}}', "added_tokens_decoder holds '5'"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "added_tokens_decoder holds"),
        ("special_tokens_map.json", b"\xff", "not UTF-8 text"),
    ],
)
def test_a_broken_text_file_is_named_in_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    """A chat_template.jinja of other bytes than UTF-8 was a traceback at start, and exit code 1."""
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as raised:
        load_tokenizer(tmp_path, None)
    assert file.name in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("entry", [[{"name": "x"}, 5, {"name": 1, "template": "a"}], {"a": 5}, [], None, 7])
def test_templates_of_another_shape_are_none(tmp_path: Path, entry: Any) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry, "auto_map": None}))
    assert load_tokenizer(tmp_path, None).chat_templates == {}
