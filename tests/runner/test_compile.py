"""Compile workers: who starts them with what, what their failure costs, and when they are not needed.

Workers here are a small Python program in place of the real one; there is no GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import msgspec
import pytest

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.engine import Choice, EngineConfig
from tokenspeed.config.gpu_choices import capture_ladder
from tokenspeed.config.model import MoeConfig
from tokenspeed.kernels.triton.compile_monitor import KernelOrder
from tokenspeed.models.registry import examples
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner import compile, compile_folder, compile_start
from tokenspeed.runner.compile import start_compile
from tokenspeed.runner.compile_folder import Compiled, Target, publish, target
from tokenspeed.runner.compile_list import list_kernels
from tokenspeed.runner.compile_start import Workers, num_workers, prepare_cache, start_early, start_workers, twin
from tokenspeed.runner.warm_up import plan_pages, representatives, warm_up_plans

GIB = 2**30
CONFIG = EngineConfig(
    model=next(example for example in examples() if example.architecture == "LlamaForCausalLM"),
    checkpoint=Checkpoint(name="x", format="safetensors", config_path="/x", weight_files=("/w",), tokenizer_path="/x"),
    load_format="safetensors",
    device="cuda",
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    max_model_len=4096,
    max_num_seqs=160,
    max_num_batched_tokens=8192,
    page_size=64,
    num_pages=None,
    kv_memory_bytes=None,
    enable_prefix_caching=True,
    enable_overlap=True,
    enforce_eager=False,
    schedule_policy="fifo",
    attention_backend="auto",
    num_threads=3,
    seed=5,
    max_queue_len=5,
    gpu_memory_utilization=0.88,
    capture_sizes=capture_ladder(160),
    choices=(Choice("--seed", "5", "drawn"),),
)
ORDERS = [KernelOrder("m", "a", "{}", 9), KernelOrder("m", "b", "{}", 1000)]
DONE = """
import os, sys, time
from pathlib import Path
import msgspec
folder = Path(sys.argv[1])
while not (folder / "end").exists():
    time.sleep(0.01)
for name in os.listdir(folder / "orders"):
    order = msgspec.msgpack.decode((folder / "orders" / name).read_bytes())
    done = dict(name=order["name"], worker=0, began_s=0.0, compile_s=1.5, launcher_s=0.5, error=ERROR)
    (folder / name).write_bytes(msgspec.msgpack.encode(done))
    (folder / name).rename(folder / "done" / name)
"""
COMPILES = DONE.replace("ERROR", "None")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A cache folder, a made-up GPU, and workers that run the given code."""
    monkeypatch.setenv(compile_start.CACHE_VARIABLE, "")  # so that what the code sets is undone
    monkeypatch.delenv(compile_start.CACHE_VARIABLE)
    monkeypatch.setattr(compile_start, "cache_folders", lambda: [tmp_path / "cache"])
    cuda = types.SimpleNamespace(
        get_device_capability=lambda: (9, 0), get_device_name=lambda: "A GPU", empty_cache=lambda: None
    )
    monkeypatch.setattr(compile.torch, "cuda", cuda)
    real = subprocess.Popen
    started = []

    def use(code: str) -> list[subprocess.Popen[bytes]]:
        def popen(command, **named):
            assert command[1:3] == ["-m", "tokenspeed.runner.compile_process"]
            started.append(real([sys.executable, "-c", code, *command[3:]], **named))
            return started[-1]

        monkeypatch.setattr(compile_start.subprocess, "Popen", popen)
        return started

    return use


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
        ((), (), 1),
        ((128, None) * 4, (), 2),
        ((128,) * 3 + (None,) * 5, (), 4),
        ((), (0,), 2),
        ((), (0, 1, 2), 4),
        ((), tuple(range(8)), 1),
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


def test_as_many_workers_as_cores():
    assert num_workers(CONFIG) == 3
    assert num_workers(msgspec.structs.replace(CONFIG, num_threads=200)) == compile_start.MAX_WORKERS


def test_success_is_remembered(machine, tmp_path):
    started = machine(COMPILES)
    with start_compile(CONFIG) as job:
        assert job.takes_orders
        folder = job._workers.folder
        assert target(folder) == Target("cuda", 90, 32)
        for order in ORDERS:
            job.order(order)
        loaded = []
        assert re.match(
            r"kernels: 2 compiled by 1 processes in .* s \(work of 4\.0 s, .*1\.5 s\)$", job.wait(True, loaded.append)
        )
        assert sorted(loaded, key=lambda order: order.name) == ORDERS, "each as soon as it is there"
        assert not folder.exists()
    assert started[0].args[-2:] == ["3", str(os.getpid())]
    assert os.environ[compile_start.CACHE_VARIABLE] == str(tmp_path / "cache/triton")
    with start_compile(CONFIG) as job:
        assert not job.takes_orders and "compiled before" in job.wait(True)
    assert len(started) == 1
    with start_compile(msgspec.structs.replace(CONFIG, page_size=32)) as job:
        job.wait(True)
    assert len(started) == 2, "another page size is another set of kernels"
    elsewhere = msgspec.structs.replace(CONFIG, checkpoint=msgspec.structs.replace(CONFIG.checkpoint, name="y"))
    with start_compile(msgspec.structs.replace(elsewhere, seed=9)) as job:
        assert "compiled before" in job.wait(True)


NOT_DECIDING = {
    "model", "checkpoint", "load_format", "num_pages", "kv_memory_bytes", "enable_prefix_caching", "enable_overlap",
    "enforce_eager", "schedule_policy", "num_threads", "seed", "max_queue_len", "gpu_memory_utilization", "pad_graphs",
    "trust_remote_code", "skip_tokenizer_init", "grammar_backend", "grammar_timeout_s", "any_whitespace",
    "decode_log_interval", "choices",
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
def test_the_marker_is_of_what_decides_the_variants(machine, changes, is_same):
    """Regression: it was of the whole configuration, so that --decode-log-interval started 16 workers over a full
    cache."""
    assert (compile_start._key(msgspec.structs.replace(CONFIG, **changes)) == compile_start._key(CONFIG)) == is_same


def test_the_marker_is_of_kernels_tables_and_steps(machine, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (DONE.replace("ERROR", "'no such kernel'"), "no such kernel"),
        ("print('out of luck'); raise SystemExit(1)", "ended with code 1: out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "ended with code -9"),
        ("pass", "they left some"),
    ],
)
def test_failed_workers_cost_time_only(machine, caplog, code, told):
    machine(code)
    for _ in range(2):  # it is tried again
        loaded = []
        with start_compile(CONFIG) as job:
            for order in ORDERS:
                job.order(order)
            assert "; 2 failed, the rest is compiled when first used" in job.wait(True, loaded.append)
        assert not loaded
    assert told in caplog.text


def test_a_kernel_that_cannot_be_loaded_says_so_when_it_is_used(machine, caplog):
    machine(COMPILES)

    def load(order):
        raise RuntimeError("too much shared memory")

    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        assert "1 compiled" in job.wait(True, load)
    assert "a was not loaded ahead: RuntimeError: too much shared memory" in caplog.text


def test_workers_end_with_the_engine(machine):
    started = machine("import time; time.sleep(60)")
    with pytest.raises(ZeroDivisionError), start_compile(CONFIG) as job:
        folder = job._workers.folder
        raise ZeroDivisionError
    assert [worker.poll() for worker in started] == [-9]
    assert not folder.exists()


def test_workers_that_hang_are_given_up(machine, monkeypatch, caplog):
    """Waiting for them would pass the time limit of a test."""
    monkeypatch.setattr(compile, "WORKER_TIMEOUT_S", 0.3)
    started = machine("import time; time.sleep(600)")
    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        assert "1 failed" in job.wait(True)
    assert "took more than" in caplog.text
    assert all(worker.poll() is not None for worker in started)


def test_workers_that_cannot_be_started_cost_time_only(machine, monkeypatch, caplog, tmp_path):
    machine(COMPILES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def popen(*_, **named):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(compile_start.subprocess, "Popen", popen)
    with start_compile(CONFIG) as job:
        assert not job.takes_orders and "no workers could be started" in job.wait(True)
    assert "Resource temporarily unavailable" in caplog.text
    assert not list(tmp_path.glob("tokenspeed-compile-*")), "its folder is gone"


def test_a_folder_that_cannot_be_filled_does_not_stay(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdir = Path.mkdir

    def full(path, *args, **named):
        if path.name == "done":
            raise OSError(28, "No space left on device")
        mkdir(path, *args, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    assert start_workers(2) is None and "No space left on device" in caplog.text
    assert not os.listdir(tmp_path)


def test_who_still_writes_does_not_find_the_folder(monkeypatch, tmp_path):
    """A file that appears while the folder is emptied would keep it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, rmtree = compile_folder.work_folder(), shutil.rmtree

    def emptied(path, **named):
        with pytest.raises(FileNotFoundError):
            (folder / "done" / "late").touch()
        rmtree(path, **named)

    monkeypatch.setattr(shutil, "rmtree", emptied)
    for _ in range(2):
        compile_folder.remove(folder)
        assert not os.listdir(tmp_path)


def test_a_worker_that_dies_halfway_costs_its_kernel_only(machine, tmp_path, caplog):
    """The others go on, and the cache is not complete."""
    machine(COMPILES.replace('os.listdir(folder / "orders")', 'os.listdir(folder / "orders")[:1]') + "\nsys.exit(1)")
    loaded = []
    with start_compile(CONFIG) as job:
        for order in ORDERS:
            job.order(order)
        assert "1 compiled by 1 processes" in (told := job.wait(True, loaded.append)) and "; 1 failed" in told
        assert len(loaded) == 1 and not job.has_loaded_all
    assert "ended with code 1" in caplog.text
    assert not list(tmp_path.glob("cache/triton/warm-*"))


def test_a_folder_that_goes_costs_time_only(machine, caplog):
    machine("import time; time.sleep(60)")
    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        shutil.rmtree(job._workers.folder)
        assert "; 1 failed, the rest is compiled when first used" in job.wait(True)
    assert "No such file" in caplog.text


def test_workers_are_there_before_the_gpu_is_asked(machine, monkeypatch):
    started = machine(COMPILES)
    monkeypatch.setattr(compile.torch, "cuda", None)
    assert start_early(msgspec.structs.replace(CONFIG, device="cpu")) is None and not started
    early = start_early(CONFIG)
    assert isinstance(early, Workers) and target(early.folder) is None and early.process.poll() is None
    with pytest.raises(AttributeError):
        start_compile(CONFIG, early)
    assert early.process.poll() == -9 and not early.folder.exists(), "the GPU did not answer"


def test_early_workers_are_taken_over(machine):
    started = machine(COMPILES)
    early = start_early(CONFIG)
    with start_compile(CONFIG, early) as job:
        job.order(ORDERS[0])
        assert "1 compiled" in job.wait(True)
    assert [worker.poll() for worker in started] == [0] and not early.folder.exists()
    assert start_early(CONFIG) is None, "all is there"
    with start_compile(CONFIG) as job:
        assert "compiled before" in job.wait(True)
    assert len(started) == 1


def test_the_marker_is_of_the_gpu(machine, monkeypatch):
    started = machine(COMPILES)
    for count, name in ((1, "A GPU"), (2, "B GPU"), (2, "A GPU")):
        monkeypatch.setattr(compile.torch.cuda, "get_device_name", lambda name=name: name)
        with start_compile(CONFIG, start_early(CONFIG)) as job:
            if job.takes_orders:
                job.order(ORDERS[0])
            job.wait(True)
        assert len(started) == count


def test_early_workers_for_what_is_there_are_ended(machine):
    """Two engines start at once, and the other one was quicker."""
    machine(COMPILES)
    early = start_early(CONFIG)
    prepare_cache(CONFIG).marker(f"A GPU, CUDA {compile.torch.version.cuda}").touch()
    with start_compile(CONFIG, early) as job:
        assert "compiled before" in job.wait(True)
    assert early.process.poll() is not None and not early.folder.exists()


def test_a_kernel_is_loaded_when_its_launcher_is_there(machine):
    """Else the engine would run the C compiler, while all others wait."""
    machine("import time; time.sleep(60)")
    loaded = []
    with start_compile(CONFIG) as job:
        folder = job._workers.folder
        for order, launcher in zip(ORDERS, ("slow", None), strict=True):
            job.order(order)
            publish(folder / "done" / sorted(job._orders)[-1], Compiled(order.name, 0, 0.0, 1.0, 0.0, None, launcher))
        assert job._take_results(folder, loaded.append) == 1 and loaded == ORDERS[1:]
        assert job._take_results(folder, loaded.append) == 0
        (folder / "launchers" / "slow").touch()
        assert job._take_results(folder, loaded.append) == 1 and loaded == ORDERS[::-1]


def test_whether_all_is_loaded(machine):
    machine(COMPILES)
    for load, is_all in ((lambda _: None, True), (lambda order: 1 // (order.name == "a"), False)):
        with start_compile(CONFIG) as job:
            assert not job.has_loaded_all
            for order in ORDERS:
                job.order(order)
            job.wait(True, load)
        assert job.has_loaded_all == is_all
        compile_start.prepare_cache(CONFIG).marker(f"A GPU, CUDA {compile.torch.version.cuda}").unlink()


def test_a_launcher_that_nobody_built_is_not_waited_for(machine):
    machine(COMPILES.replace("launcher_s=0.5", "launcher_s=0.5, launcher='lost'"))
    loaded = []
    with start_compile(CONFIG) as job:
        job.order(ORDERS[0])
        assert "1 compiled" in job.wait(True, loaded.append)
    assert loaded == ORDERS[:1]


def test_starting_workers_takes_neither_torch_nor_triton():
    """They would not be started early, and would not hear of the engine's death meanwhile."""
    parts = "tokenspeed.engine.process, tokenspeed.runner.compile_process"
    code = f"import sys, {parts}; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cache_folders(machine, tmp_path, monkeypatch):
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
    started = machine(COMPILES)
    monkeypatch.setenv(compile_start.CACHE_VARIABLE, str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match=r"file/x: Not a directory\); set TRITON_CACHE_DIR to"):
        start_compile(CONFIG)
    assert not started


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
def test_a_full_disk_is_found_before_triton_meets_it(machine, monkeypatch, room, told):
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


def test_a_list_that_failed_is_not_remembered(machine, tmp_path):
    """Regression: the cache counted as complete, and no later start had workers."""
    started = machine(COMPILES)
    for count, orders in ((1, []), (2, ORDERS[:1])):
        with start_compile(CONFIG) as job:
            assert not list_kernels(msgspec.structs.replace(CONFIG, device="nowhere"), job.order)
            for order in orders:
                job.order(order)
            job.wait(False)
        assert len(started) == count and not list(tmp_path.glob("cache/triton/warm-*"))
    with start_compile(CONFIG) as job:
        job.wait(True)
    assert not list(tmp_path.glob("cache/triton/warm-*")), "nothing was ordered"


def test_late_workers_end_when_the_gpu_does_not_answer(machine, monkeypatch):
    started = machine("import time; time.sleep(60)")
    prepare_cache(CONFIG).marker("another").touch()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compile, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_compile(CONFIG)
    assert [worker.poll() for worker in started] == [-9]
    monkeypatch.setattr(compile.torch.cuda, "get_device_capability", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_compile(CONFIG)
    assert len(started) == 1, "the GPU is asked before they are started"
