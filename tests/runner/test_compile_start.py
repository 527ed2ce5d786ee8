"""What is known before a compile worker starts: the twin, what the mark of a complete cache is of, where it lies."""

from __future__ import annotations

import contextlib
import os
import resource
import stat

import msgspec
import pytest
from compile_support import CONFIG

from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import MoeConfig
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner import compile_start
from tokenspeed.runner.compile_start import prepare_cache, twin
from tokenspeed.runner.warm_up import plan_pages, representatives, warm_up_plans

GIB = 2**30


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder that is chosen unless a test chooses another."""
    monkeypatch.setenv(compile_start.CACHE_VARIABLE, "")  # so that what the code sets is undone
    monkeypatch.delenv(compile_start.CACHE_VARIABLE)
    monkeypatch.setattr(compile_start, "cache_folders", lambda: [tmp_path / "cache"])


def test_the_twin_has_the_same_kernels_and_little_memory():
    small = twin(CONFIG)
    assert small.model == msgspec.structs.replace(CONFIG.model, num_layers=1)
    assert (small.load_format, small.checkpoint.format, small.checkpoint.weight_files) == ("dummy", "config", ())
    assert small.num_pages == 64 and small.num_pages >= plan_pages(warm_up_plans(160, 4096, 1024, 64))
    assert small.grammar_backend == "none", "it would start a process of its own"
    assert small.capture_sizes == representatives(CONFIG.capture_sizes)
    same = ("dtype", "page_size", "max_model_len", "max_num_seqs", "attention_backend", "kv_cache_dtype")
    assert all(getattr(small, name) == getattr(CONFIG, name) for name in same)


def sparse(num_layers: int, windows: tuple[int | None, ...], dense_layers: tuple[int, ...] = ()) -> EngineConfig:
    moe = MoeConfig(num_experts=8, top_k=2, intermediate_size=32, dense_layers=dense_layers)
    model = msgspec.structs.replace(CONFIG.model, num_layers=num_layers, layer_windows=windows, moe=moe)
    return msgspec.structs.replace(CONFIG, model=model)


@pytest.mark.parametrize(
    ("windows", "dense_layers", "count"),
    [
        ((), (), 2),  # the last layer's experts meet few tokens: another one's are wanted
        ((128, None) * 4, (), 2),
        ((128,) * 3 + (None,) * 5, (), 4),
        ((), (0,), 3),
        ((), (0, 1, 2), 5),
        ((), tuple(range(7)), 8),
        ((), tuple(range(8)), 2),
        ((128, None) * 4, (0, 7), 8),
        ((128, None) * 4, (0, 1), 4),
    ],
)
def test_the_twin_has_a_layer_of_every_kind(windows, dense_layers, count):
    """Regression: one layer only, so that kernels of the other kinds were compiled while requests waited."""
    config = sparse(8, windows, dense_layers)
    small = twin(config).model
    assert small.num_layers == count
    assert small.layer_windows == windows[:count]
    assert small.moe == msgspec.structs.replace(
        config.model.moe, dense_layers=tuple(layer for layer in dense_layers if layer < count)
    )

    def kinds(model):
        return {
            (model.layer_windows[layer] if windows else None, layer in model.moe.dense_layers)
            for layer in range(model.num_layers)
        }

    assert kinds(small) == kinds(config.model)


NOT_DECIDING = {
    "model", "checkpoint", "load_format", "num_pages", "kv_memory_bytes", "enable_prefix_caching", "enable_overlap",
    "enforce_eager", "schedule_policy", "num_threads", "seed", "max_queue_len", "gpu_memory_utilization", "pad_graphs",
    "trust_remote_code", "skip_tokenizer_init", "grammar_backend", "grammar_timeout_s", "any_whitespace",
    "decode_log_interval", "choices", "has_e4m3",  # which follows from the GPU, a part of the key
}  # fmt: skip


def test_every_field_is_known_to_decide_or_not():
    """A new field must be put on either side. The model's shape has a rule of its own, and `enforce_eager` and
    `load_format` speak through the sizes that are recorded and the model's `qtype`."""
    fields = set(EngineConfig.__struct_fields__)
    assert set(compile_start.DECIDING_FIELDS) | NOT_DECIDING == fields
    assert not set(compile_start.DECIDING_FIELDS) & NOT_DECIDING
    assert set(compile_start.TEXT_FIELDS) < set(type(CONFIG.model).__struct_fields__)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"decode_log_interval": 7}, True),
        ({"max_queue_len": 9, "schedule_policy": "priority", "enable_prefix_caching": False}, True),
        ({"gpu_memory_utilization": 0.5, "kv_memory_bytes": GIB, "num_threads": 9, "seed": 9, "choices": ()}, True),
        ({"model": msgspec.structs.replace(CONFIG.model, eos_token_ids=(9,), sampling_defaults={"top_p": 0.5})}, True),
        ({"model": msgspec.structs.replace(CONFIG.model, num_layers=CONFIG.model.num_layers + 1)}, True),
        ({"model": msgspec.structs.replace(CONFIG.model, hidden_size=2 * CONFIG.model.hidden_size)}, False),
        ({"dtype": "float16"}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, False),
        ({"quantize_on_load": "fp8"}, False),
        ({"page_size": 32}, False),
        ({"max_model_len": 4097}, False),
        ({"max_num_seqs": 161}, False),
        ({"capture_sizes": (1, 2)}, False),
        ({"prefill_sizes": (16,)}, False),
        ({"max_num_batched_tokens": 512}, False),
        ({"attention_backend": "fa3"}, False),
        ({"moe_backend": "torch"}, False),
    ],
)
def test_the_marker_is_of_what_decides_the_variants(changes, is_same):
    """Regression: it was of the whole configuration, so that --decode-log-interval started 16 workers over a full
    cache."""
    assert (compile_start._key(msgspec.structs.replace(CONFIG, **changes)) == compile_start._key(CONFIG)) == is_same


def test_the_marker_is_of_kernels_tables_and_steps(tmp_path, monkeypatch):
    """Regression: a tuned table changes tiles, and the marker still said that all was compiled."""
    names = {path.name for path in compile_start._deciding_files()}
    assert {"decode_attention.py", "NVIDIA_H200.json", "warm_up.py"} <= names
    folder, steps = tmp_path / "triton", tmp_path / "steps.py"
    (folder / "tables").mkdir(parents=True)
    kernel, table = folder / "kernel.py", folder / "tables" / "A_GPU.json"
    for path in (kernel, table, steps):
        path.write_text("1")
    monkeypatch.setattr(compile_start.tokenspeed.kernels.triton, "__path__", [str(folder)])
    monkeypatch.setattr(compile_start.warm_up, "__file__", str(steps))
    seen = {compile_start._key(CONFIG)}
    for path in (kernel, table, steps):
        path.write_text("2")
        seen.add(compile_start._key(CONFIG))
    assert len(seen) == 4
    assert compile_start._key(CONFIG) in seen, "nothing has changed since"


def test_cache_folders(tmp_path, monkeypatch):
    open_folder = tmp_path / "open" / "triton"
    open_folder.mkdir(parents=True)
    open_folder.chmod(0o777)
    monkeypatch.setattr(compile_start, "cache_folders", lambda: [tmp_path / "open", tmp_path / "second"])
    assert prepare_cache(CONFIG).folder == tmp_path / "second/triton", "others may write to the first"
    assert stat.S_IMODE((tmp_path / "second/triton").stat().st_mode) == 0o700
    monkeypatch.setenv(compile_start.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert prepare_cache(CONFIG).folder == tmp_path / "mine"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compile_start.CACHE_VARIABLE, str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match=r"file/x: Not a directory\); set TRITON_CACHE_DIR to"):
        prepare_cache(CONFIG)


@contextlib.contextmanager
def disk(room: int):
    """No file may be longer than `room` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("room", "told"), [(0, "File too large"), (4096, "No space left on device")])
def test_a_full_disk_is_found_before_triton_meets_it(monkeypatch, room, told):
    """Regression: it said that kernels would be compiled when first used, and Triton raised an OSError there."""
    with disk(room), pytest.raises(ConfigError, match=f"cache/triton: {told}.*; set TOKENSPEED_CACHE to"):
        prepare_cache(CONFIG)
    marker = prepare_cache(CONFIG).marker("A GPU")
    monkeypatch.delenv(compile_start.CACHE_VARIABLE)
    marker.touch()
    with disk(room):
        assert prepare_cache(CONFIG, "A GPU").folder == marker.parent, "nothing need be written there"
        with pytest.raises(ConfigError):
            prepare_cache(CONFIG, "another")
    assert os.listdir(marker.parent) == [marker.name]
