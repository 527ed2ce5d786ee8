"""resolve with a GPU: its defaults, what is refused on either device, and which batch sizes are recorded."""

from __future__ import annotations

import msgspec
import pytest

from tokenspeed.attention.select import BACKENDS
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.args import EngineArgs
from tokenspeed.config.device import DeviceInfo
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.gpu import GpuInfo
from tokenspeed.config.gpu_choices import UNRECORDABLE_ATTENTION, capture_ladder, exact_ladder, memory_utilization
from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.config.resolve import resolve
from tokenspeed.models.qwen3_moe import EXAMPLE as QWEN3_MOE
from tokenspeed.protocol.errors import ConfigError

GIB = 2**30
CHECKPOINT = Checkpoint(name="m", format="safetensors", config_path="/c", weight_files=("/w",), tokenizer_path="/t")
MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position=40960,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    dtype="bfloat16",
)
GPU = GpuInfo(name="NVIDIA H200", memory_total_bytes=140 * GIB, compute_capability=(9, 0), uuid="GPU-1")
CPU_ONLY = DeviceInfo(
    num_cores=16,
    num_physical_cores=8,
    memory_total_bytes=64 * GIB,
    memory_available_bytes=60 * GIB,
    gpu_obstacle="no NVIDIA driver was found",
)
H200 = msgspec.structs.replace(CPU_ONLY, gpus=(GPU,), gpu_obstacle=None)


def engine(args=None, device=H200, model=MODEL) -> EngineConfig:
    return resolve(args or EngineArgs(), CHECKPOINT, model, device)[0]


def refused(args: EngineArgs, device=H200) -> str:
    with pytest.raises(ConfigError) as raised:
        engine(args, device)
    return str(raised.value)


def reason(config: EngineConfig, name: str) -> str:
    (choice,) = [choice for choice in config.choices if choice.name == name]
    return f"{choice.value}: {choice.reason}"


def test_the_defaults_of_an_h200():
    config = engine()
    assert (config.device, config.dtype, config.kv_cache_dtype) == ("cuda", "bfloat16", "bfloat16")
    assert (config.page_size, config.max_num_batched_tokens, config.max_num_seqs) == (64, 8192, 160)
    assert (config.num_pages, config.kv_memory_bytes, config.gpu_memory_utilization) == (None, None, 0.88)
    assert (config.max_model_len, config.pad_graphs, config.num_threads) == (40960, True, 8)
    assert config.capture_sizes == (*(1, 2, 4), *range(8, 129, 8), 144, 160)
    assert "NVIDIA H200, 140 GiB, compute capability 9.0" in reason(config, "--device")
    assert all(choice.value and choice.reason for choice in config.choices)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize("backend", ["auto", "deep_gemm"])
def test_float16_for_experts_that_do_not_compute_in_it(backend: str):
    """Whatever backend is asked for: the advice must not be one that refuses them as well."""
    args = EngineArgs(dtype="half", moe_backend=backend, quantization="fp8")
    with pytest.raises(ConfigError, match=r"no MoE backend computes in float16; use --dtype bfloat16$"):
        engine(args, model=QWEN3_MOE)


def test_without_a_gpu_auto_is_the_cpu_and_says_why():
    config = engine(device=CPU_ONLY)
    assert (config.device, config.gpu_memory_utilization, config.capture_sizes) == ("cpu", None, ())
    assert "no NVIDIA driver" in reason(config, "--device")


def test_cuda_without_a_gpu_names_what_is_missing():
    message = refused(EngineArgs(device="cuda"), CPU_ONLY)
    assert "no NVIDIA driver was found" in message and "--device cpu" in message


def test_an_old_gpu_is_not_used():
    old = msgspec.structs.replace(GPU, name="Tesla T4", compute_capability=(7, 5))
    device = msgspec.structs.replace(H200, gpus=(old,))
    assert engine(device=device).device == "cpu"
    assert "Tesla T4 has compute capability 7.5" in refused(EngineArgs(device="cuda"), device)


A100 = msgspec.structs.replace(GPU, name="NVIDIA A100", compute_capability=(8, 0))
WITHOUT_E4M3 = msgspec.structs.replace(H200, gpus=(A100,))
WITH_E4M3 = msgspec.structs.replace(H200, gpus=(msgspec.structs.replace(A100, compute_capability=(8, 9)),))


@pytest.mark.parametrize("flag", ["fp8", "fp8_e4m3"])
def test_an_8_bit_cache_needs_a_gpu_with_8_bit_floats(flag: str):
    """Regression: the start went on and ended with the compiler's error."""
    args = EngineArgs(kv_cache_dtype=flag)
    message = refused(args, WITHOUT_E4M3)
    assert "NVIDIA A100 has compute capability 8.0" in message and "need 8.9" in message
    assert message.startswith(f"--kv-cache-dtype is {flag}") and message.endswith("use --kv-cache-dtype auto")
    assert engine(args, WITH_E4M3).kv_cache_dtype == engine(args).kv_cache_dtype == "fp8_e4m3"


def test_weights_are_not_quantized_where_they_would_be_widened_again():
    """Regression: accuracy was lost and no memory won, with a line of the log."""
    args = EngineArgs(quantization="fp8")
    message = refused(args, WITHOUT_E4M3)
    assert "--quantization is fp8" in message and "NVIDIA A100" in message and "leave the flag out" in message
    config = engine(args, WITH_E4M3)
    assert config.quantize_on_load == "fp8" and config.has_e4m3
    assert not engine(device=WITHOUT_E4M3).has_e4m3
    for dtype in ("half", "float32"):
        assert "use --dtype bfloat16" in refused(EngineArgs(quantization="fp8", dtype=dtype))
    experts = engine(EngineArgs(quantization="fp8", dtype="float32"), model=QWEN3_MOE)
    assert experts.quantize_on_load == "fp8", "experts stay in 8 bits"


def test_a_checkpoint_stored_in_8_bits_runs_without():
    stored = QuantizationConfig(method="fp8", granularity="tensor", activations="dynamic")
    model = msgspec.structs.replace(MODEL, quantization=stored)
    for flag in (None, "fp8"):
        config = engine(EngineArgs(quantization=flag), WITHOUT_E4M3, model)
        assert config.quantize_on_load is None and not config.has_e4m3


def test_a_checkpoint_made_for_an_8_bit_cache_runs_without():
    model = msgspec.structs.replace(MODEL, kv_cache_is_fp8=True)
    config = engine(device=WITHOUT_E4M3, model=model)
    assert config.kv_cache_dtype == "bfloat16"
    assert "made for fp8_e4m3, but NVIDIA A100" in reason(config, "--kv-cache-dtype")
    assert engine(model=model).kv_cache_dtype == "fp8_e4m3"
    on_cpu = engine(EngineArgs(device="cpu"), WITHOUT_E4M3, model)
    assert on_cpu.kv_cache_dtype == "fp8_e4m3", "a CPU has kernels for it"


def test_the_cpu_can_be_asked_for_beside_a_gpu():
    config = engine(EngineArgs(device="cpu"))
    assert (config.device, config.page_size) == ("cpu", 16)


@pytest.mark.parametrize(
    ("dtype", "qtype", "chosen"),
    [
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float16"),
        ("float32", None, "float32"),
        ("bfloat16", "Q4_1", "bfloat16"),
    ],
)
def test_dtype_is_the_checkpoints(dtype, qtype, chosen):
    config = engine(model=msgspec.structs.replace(MODEL, dtype=dtype, qtype=qtype))
    assert config.dtype == chosen
    assert ("--dtype bfloat16" in reason(config, "--dtype")) == (chosen == "float32")


@pytest.mark.parametrize(("asked", "chosen"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtype_as_asked(asked, chosen):
    assert engine(EngineArgs(dtype=asked)).dtype == chosen


@pytest.mark.parametrize(
    ("args", "device", "parts"),
    [
        (EngineArgs(gpu_memory_utilization=0.5), CPU_ONLY, ["--gpu-memory-utilization", "GPU", "--device cuda"]),
        (EngineArgs(cudagraph_capture_sizes=(1,)), CPU_ONLY, ["--cudagraph-capture-sizes", "on a CPU"]),
        (EngineArgs(max_cudagraph_capture_size=4), CPU_ONLY, ["--max-cudagraph-capture-size"]),
        (EngineArgs(disable_cuda_graph_padding=True), CPU_ONLY, ["--disable-cuda-graph-padding"]),
        (EngineArgs(num_threads=2), H200, ["--num-threads", "on a GPU", "--device cpu"]),
        (EngineArgs(kv_cache_memory_gb=141), H200, ["141", "140.0 GiB", "in the GPU"]),
        (EngineArgs(max_total_tokens=640, max_model_len=641), H200, ["641", "640 tokens"]),
        (EngineArgs(enforce_eager=True, cudagraph_capture_sizes=(1,)), H200, ["together with --enforce-eager"]),
        (EngineArgs(enforce_eager=True, max_cudagraph_capture_size=8), H200, ["--max-cudagraph-capture-size"]),
        (EngineArgs(enforce_eager=True, disable_cuda_graph_padding=True), H200, ["--disable-cuda-graph-padding"]),
        (
            EngineArgs(attention_backend="flashinfer", cudagraph_capture_sizes=(1,)),
            H200,
            ["--cudagraph-capture-sizes was given together with --attention-backend flashinfer", "no step is recorded"],
        ),
        (EngineArgs(attention_backend="flashinfer", max_cudagraph_capture_size=8), H200, ["--max-cudagraph-capture"]),
        (EngineArgs(attention_backend="flashinfer", disable_cuda_graph_padding=True), H200, ["-graph-padding was"]),
        (
            EngineArgs(attention_backend="flashinfer", prefill_graph_max_tokens=64),
            H200,
            ["--prefill-graph-max-tokens was given together with --attention-backend flashinfer"],
        ),
        (EngineArgs(disable_prefill_graph=True), CPU_ONLY, ["--disable-prefill-graph", "on a CPU"]),
        (EngineArgs(prefill_graph_max_tokens=64), CPU_ONLY, ["--prefill-graph-max-tokens", "on a CPU"]),
        (EngineArgs(prefill_graph_capture_sizes=(64,)), CPU_ONLY, ["--prefill-graph-capture-sizes", "on a CPU"]),
        (
            EngineArgs(enforce_eager=True, prefill_graph_max_tokens=64),
            H200,
            ["max-tokens was given together with --enf"],
        ),
        (
            EngineArgs(disable_prefill_graph=True, prefill_graph_capture_sizes=(64,)),
            H200,
            ["--prefill-graph-capture-sizes was given together with --disable-prefill-graph"],
        ),
        (
            EngineArgs(prefill_graph_max_tokens=0, prefill_graph_capture_sizes=(64,)),
            H200,
            ["together with --prefill-graph-max-tokens 0"],
        ),
        (
            EngineArgs(prefill_graph_max_tokens=8, prefill_graph_capture_sizes=(64,)),
            H200,
            ["no size up to 8", "--disable-prefill-graph"],
        ),
        (EngineArgs(cudagraph_capture_sizes=(200,)), H200, ["no size up to 160", "--max-num-seqs 160"]),
    ],
)
def test_refused_by_name_with_a_remedy(args, device, parts):
    message = refused(args, device)
    for part in parts:
        assert part in message, message


def test_no_wish_is_ignored_on_a_gpu():
    default = engine()
    for name, value in {
        "gpu_memory_utilization": 0.5,
        "cudagraph_capture_sizes": (1, 2),
        "max_cudagraph_capture_size": 8,
        "disable_cuda_graph_padding": True,
        "disable_prefill_graph": True,
        "prefill_graph_max_tokens": 128,
        "prefill_graph_capture_sizes": (64,),
        "enforce_eager": True,
        "max_total_tokens": 64000,
        "kv_cache_memory_gb": 2.0,
        "device": "cpu",
    }.items():
        assert engine(EngineArgs(**{name: value})) != default, name


def test_sizes_of_the_pool_as_given():
    assert engine(EngineArgs(kv_cache_memory_gb=9)).kv_memory_bytes == 9 * GIB
    assert engine(EngineArgs(max_total_tokens=64 * 1000)).num_pages == 1000


def test_capture_sizes_are_filtered_and_said():
    config = engine(EngineArgs(cudagraph_capture_sizes=(8, 1, 8, 512), max_num_seqs=64))
    assert config.capture_sizes == (1, 8)
    assert "without 512" in reason(config, "--cudagraph-capture-sizes")
    assert engine(EngineArgs(max_cudagraph_capture_size=12)).capture_sizes == (1, 2, 4, 8, 12)
    assert engine(EngineArgs(max_num_seqs=3)).capture_sizes == (1, 2, 3)
    assert max(engine(EngineArgs(max_num_seqs=4000)).capture_sizes) == 512
    assert engine(EngineArgs(enforce_eager=True)).capture_sizes == ()


def test_attention_that_cannot_be_recorded_records_nothing_and_says_so():
    config = engine(EngineArgs(attention_backend="flashinfer"))
    assert (config.capture_sizes, config.prefill_sizes) == ((), ())
    assert "--attention-backend flashinfer" in reason(config, "--cudagraph-capture-sizes")
    assert engine(EngineArgs(attention_backend="fa3")).capture_sizes
    unrecordable = {backend.name for backend in BACKENDS if not backend.can_record}
    assert unrecordable == set(UNRECORDABLE_ATTENTION)


def test_prefill_sizes():
    fine = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
    assert engine().prefill_sizes == (*fine, 640, 768, 896, 1024)
    assert engine(EngineArgs(chunked_prefill_size=512)).prefill_sizes == fine
    assert engine(EngineArgs(prefill_graph_max_tokens=1300)).prefill_sizes[-3:] == (1152, 1280, 1300)
    assert "launching" in reason(engine(), "--prefill-graph-max-tokens")
    assert engine(EngineArgs(chunked_prefill_size=100)).prefill_sizes == (16, 32, 64, 100)
    assert engine(EngineArgs(prefill_graph_max_tokens=1000)).prefill_sizes[-2:] == (896, 1000)
    assert engine(EngineArgs(prefill_graph_max_tokens=9)).prefill_sizes == (9,)
    assert engine(EngineArgs(prefill_graph_max_tokens=1)).prefill_sizes == ()
    for off in ({"prefill_graph_max_tokens": 0}, {"disable_prefill_graph": True}, {"enforce_eager": True}):
        assert engine(EngineArgs(**off)).prefill_sizes == ()
    config = engine(EngineArgs(prefill_graph_capture_sizes=(64, 32, 64, 9000)))
    assert config.prefill_sizes == (32, 64)
    assert "none above 8192" in reason(config, "--prefill-graph-capture-sizes")
    assert engine(EngineArgs(prefill_graph_capture_sizes=(600, 40))).prefill_sizes == (40, 600)


def test_exact_sizes_without_padding():
    config = engine(EngineArgs(disable_cuda_graph_padding=True))
    assert config.capture_sizes == (*range(1, 33), 64, 96, 128, 160)
    assert not config.pad_graphs


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 9, 64, 100, 160, 256, 511, 512])
def test_the_ladder_pads_little_and_ends_at_the_limit(limit):
    sizes = capture_ladder(limit)
    assert sizes[-1] == limit and list(sizes) == sorted(set(sizes))
    for rows in range(1, limit + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < max(8, rows / 8 + 1)
    assert exact_ladder(limit)[-1] == limit


def test_memory_share_by_ranks():
    """Several ranks cannot be asked for yet, so the table is looked at with a stand-in."""
    shares = {}
    for ranks in (1, 2, 3, 4, 8, 16, 32):
        args = EngineArgs()
        object.__setattr__(args, "tensor_parallel_size", ranks)
        shares[ranks] = memory_utilization(args, [])
    assert shares == {1: 0.88, 2: 0.87, 3: 0.87, 4: 0.95, 8: 0.81, 16: 0.79, 32: 0.79}
