"""Flags that people will type and that this version does not have: what each is, and what to do instead.

A table by name. A flag leaves it in the commit that builds the feature. Nothing here is ever swallowed: a refused flag
ends the process with exit code 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Refused:
    """One refused flag: its spellings, what it is, and the reason or the remedy."""

    names: tuple[str, ...]
    what: str
    instead: str

    def message(self, name: str) -> str:
        """The error for the user who typed `name`."""
        return f"known flag {name} ({self.what}) is not available in this version: {self.instead}"


def _all(instead: str, *flags: tuple[str, str]) -> tuple[Refused, ...]:
    """Several flags with one reason. Each is (names separated by spaces, what it is)."""
    return tuple(Refused(tuple(names.split()), what, instead) for names, what in flags)


_SERVING = (
    *_all(
        "server and engine are started by this one command on one port; leave the flag out",
        ("--gateway-startup-timeout", "seconds to wait for a separate gateway"),
        ("--control-port", "port of a separate control server"),
        ("--rl-control-port", "port of the reinforcement learning control server"),
        ("--prometheus-port", "separate port for metrics; `/metrics` is on --port"),
        ("--zmq-msgpack", "engine driven by an external gateway"),
        ("--data-parallel-address", "address of an external gateway"),
        ("--data-parallel-rpc-port", "port of an external gateway"),
        ("--zmq-engine-index", "index of an engine behind an external gateway"),
        ("--policy", "gateway routing policy over several engines"),
        ("--load-balance-method", "balancing over data parallel ranks"),
        ("--load-watch-interval", "interval of load reports between ranks"),
        ("--tokenizer-cache-enable-l0", "gateway tokenizer cache of whole prompts"),
        ("--tokenizer-cache-enable-l1", "gateway tokenizer cache of prompt prefixes"),
        ("--app-key", "second API key"),
        ("--log-level-http", "separate log level of the HTTP server; use --log-level"),
    ),
    *_all(
        "an engine without the HTTP server is not built yet; use `tokenspeed.LLM` from Python",
        ("--headless", "engine only, without HTTP"),
    ),
    *_all(
        "tools are called by whoever sends the request; leave the flag out",
        ("--tool-server", "address of built-in tools"),
    ),
    *_all(
        "use --grammar-backend, --grammar-compile-timeout-secs and --disable-any-whitespace",
        ("--structured-outputs-config", "settings of structured output"),
    ),
    *_all(
        "a grammar that does not compile in time is refused, at once when it comes again; leave the flag out",
        ("--grammar-compile-max-retries", "retries of grammar compilation"),
    ),
    *_all(
        "masks are filled on the host while the device computes, with graphs or without; leave the flag out",
        ("--disable-capturable-grammar", "grammar outside of recorded graphs"),
    ),
)

_LOADING = (
    *_all(
        "the tokenizer is that of the checkpoint, or of --tokenizer; leave the flag out",
        ("--tokenizer-mode", "kind of tokenizer"),
    ),
    *_all(
        "only text models are served; leave the flag out",
        ("--language-model-only", "skip the vision and audio towers"),
        ("--mm-attention-backend", "attention of the vision tower"),
        ("--mm-encoder-tp-mode", "how the vision tower is sharded"),
        ("--limit-mm-per-prompt", "limit of images, video and audio in a prompt"),
    ),
    *_all(
        "weights are streamed from disk straight to their place; leave the flag out",
        ("--ext-yaml", "description of an external loader"),
        ("--delete-ckpt-after-loading", "delete the checkpoint once loaded"),
        ("--disable-weight-loader-prefetch-checkpoints", "no read-ahead of the checkpoint"),
        ("--weight-loader-prefetch-num-threads", "threads of the read-ahead"),
        ("--weight-cache-mode", "keep weights in a separate process"),
        ("--weight-cache-socket", "socket of the weight cache process"),
        ("--safetensors-load-strategy", "how safetensors files are read"),
    ),
    *_all(
        "updating weights of a running engine is not built yet",
        ("--enable-memory-saver", "give memory back while paused"),
    ),
    *_all(
        "sampling defaults come from the model's generation_config.json; change them there or in the request",
        ("--preferred-sampling-params", "sampling parameters shown to clients"),
        ("--generation-config", "where sampling defaults come from"),
        ("--override-generation-config", "sampling defaults of the server"),
    ),
    *_all(
        "scales of an 8-bit KV cache are read from the checkpoint's tensors; leave the flag out",
        ("--quantization-param-path", "file with KV cache scales"),
        ("--kv-cache-quant-method", "granularity of KV cache quantization"),
    ),
    *_all(
        "this model kind is not built yet",
        ("--mamba-ssm-dtype", "precision of recurrent states"),
        ("--kda-backend", "kernels of linear attention"),
        ("--disable-kda-prefill-graph", "no prefill graph for linear attention"),
        ("--enable-replay-ssm", "replay of recurrent states after speculation"),
        ("--disable-replay-ssm", "no replay of recurrent states after speculation"),
        (
            "--attention-use-fp4-indexer-cache --attention-config.use-fp4-indexer-cache"
            " --attention_config.use_fp4_indexer_cache",
            "4-bit cache of the sparse attention indexer",
        ),
        (
            "--attention-config.use-trtllm-ragged-deepseek-prefill"
            " --attention_config.use_trtllm_ragged_deepseek_prefill",
            "kernel of latent attention prefill",
        ),
        ("--mla-disable-ragged", "latent attention prefill without the ragged kernel"),
        ("--mla-chunk-multiplier", "chunk capacity of latent attention"),
        ("--deepseek-v4-mega-moe-max-num-tokens", "token limit of the fused expert kernel"),
        ("--deepseek-v4-indexer-prefill-max-logits-mb", "memory of the sparse attention indexer"),
        ("--deepseek-v4-prefill-chunk-size", "prefill chunk of sparse attention"),
    ),
    *_all(
        "activations in front of MXFP4 experts keep 16 bits; leave the flag out",
        ("--moe-mxfp4-fp8-activation", "fp8 activations in front of MXFP4 experts"),
    ),
    *_all(
        "adapters are not built yet; serve a checkpoint that the adapter has been merged into",
        ("--enable-lora --lora-modules --max-loras --max-lora-rank", "LoRA adapters"),
    ),
)

_MEMORY = (
    *_all(
        "use --chunked-prefill-size, the token budget of one step (or --max-total-tokens for the size of the KV pool)",
        ("--max-num-batched-tokens", "token budget of one step in vLLM's spelling"),
        ("--max-prefill-tokens", "token budget when chunking is off"),
    ),
    *_all(
        "prompts are chunked to --chunked-prefill-size; pass -1 there to turn chunking off",
        ("--no-enable-chunked-prefill", "no chunked prefill in vLLM's spelling"),
    ),
    *_all(
        "use --kv-cache-memory-gb, in GiB, for the size of the KV cache, or --gpu-memory-utilization",
        ("--kv-cache-memory-bytes --kv-cache-memory", "size of the KV cache in bytes"),
        ("--num-gpu-blocks-override", "pages of the KV cache"),
        ("--mem-fraction-static", "share of memory for weights and KV cache"),
    ),
    *_all(
        "use --no-enable-prefix-caching",
        ("--disable-prefix-caching", "no prefix cache"),
        ("--disable-radix-cache", "no prefix cache in another server's spelling"),
    ),
    *_all(
        "a preempted request is recomputed, nothing is swapped to host memory; leave the flag out",
        ("--swap-space", "host memory for swapped requests"),
        ("--cpu-offload-gb", "weights kept in host memory"),
    ),
    *_all(
        "there is no host KV store yet; leave the flag out",
        ("--kvstore-ratio", "host KV store relative to the device pool"),
        ("--kvstore-size", "size of the host KV store"),
        ("--kvstore-io-backend", "copy method of the host KV store"),
        ("--kvstore-mem-layout", "memory layout of the host KV store"),
        ("--kvstore-storage-backend", "storage behind the host KV store"),
        ("--kvstore-storage-backend-extra-config", "settings of the storage behind the host KV store"),
        ("--kv-events-config", "stream of prefix cache events"),
        ("--kv-transfer-config", "KV transfer between engines"),
    ),
    *_all("use --schedule-policy", ("--scheduling-policy", "order of waiting requests in vLLM's spelling")),
    *_all("use --seed", ("--random-seed", "seed in another server's spelling")),
    *_all("use --max-model-len", ("--context-length", "context length in another server's spelling")),
    *_all("use --max-num-seqs", ("--max-running-requests", "running requests in another server's spelling")),
    *_all(
        "logit processors from a request would run foreign code; use logit_bias",
        ("--enable-custom-logit-processor", "logit processors sent by clients"),
    ),
)

_GRAPHS = (
    *_all(
        "graphs are recorded without such settings; leave the flag out",
        ("--enable-cudagraph-gc", "garbage collection while recording"),
        ("--disable-cudagraph-memory-reserve", "no memory set aside for graphs"),
        ("--prefill-graph-capture-batch-sizes", "recorded prefill batch sizes"),
        ("--disable-autotune --disable-flashinfer-autotune", "no kernel tuning at start"),
        ("--disable-pdl", "no programmatic dependent launch"),
        ("--compilation-config -O", "torch.compile settings"),
    ),
    *_all(
        "every path is warmed up before the server is ready; leave the flag out",
        ("--warmups", "names of warm-up requests"),
    ),
)

_KERNELS = (
    *_all(
        "kernels are chosen by the engine, and the log says which and why; leave the flag out",
        ("--sampling-backend", "sampling kernels"),
        ("--dense-gemm-backend", "kernels of dense layers"),
        ("--disable-tf32", "no TF32 on NVIDIA GPUs"),
        ("--triton-attention-reduce-in-fp32", "fp32 reduction in a GPU attention kernel"),
    ),
    *_all(
        "bitwise matching of a training stack is not built yet",
        ("--numerics", "numerics preset"),
        ("--sampling-stream", "random stream of sampling"),
        ("--yarn-ramp-mask-device", "where a rotary mask is computed"),
        ("--mla-lora-scale", "scale of latent attention"),
        ("--layer-boundary-norm", "norm placement at layer boundaries"),
        ("--router-topk", "top-k method of the expert router"),
        ("--logprob-order", "order of logprob operations"),
        ("--moe-combine-order", "order of expert sums"),
    ),
)

_SPECULATION = _all(
    "speculative decoding is not built yet; leave the flag out, output is the same without it",
    ("--speculative-config --speculative_config", "speculative decoding in one JSON object"),
    ("--speculative-algorithm", "draft method"),
    ("--speculative-draft-model-path --speculative-model", "draft model"),
    ("--draft-model-path-use-base", "draft model from the base checkpoint"),
    ("--speculative-draft-model-quantization", "quantization of the draft model"),
    ("--speculative-num-steps", "draft steps"),
    ("--speculative-eagle-topk", "branches of a draft tree"),
    ("--speculative-num-draft-tokens --num-speculative-tokens", "draft tokens a step"),
    ("--eagle3-layers-to-capture", "layers that feed the draft model"),
    ("--drafter-attention-backend", "attention kernels of the draft model"),
    ("--draft-moe-backend", "expert kernels of the draft model"),
    ("--enable-speculative-sampling", "rejection sampling of drafts"),
)

_PARALLELISM = (
    *_all(
        "parallelism over several ranks is not built yet; leave the flag out",
        ("--attn-tp-size", "ranks of one attention group"),
        ("--dense-tp-size", "ranks of one dense layer group"),
        ("--moe-tp-size", "ranks of one expert layer group"),
        ("--enable-expert-parallel", "experts spread over all ranks"),
        ("--pipeline-parallel-size --pp", "pipeline stages"),
        ("--decode-context-parallel-size", "ranks sharing one sequence's KV cache"),
        ("--world-size", "number of ranks"),
        ("--nprocs-per-node", "ranks a node"),
        ("--nnodes", "number of nodes"),
        ("--node-rank", "index of this node"),
        ("--dist-init-addr", "rendezvous address"),
        ("--distributed-timeout-seconds", "time limit of collectives"),
        ("--distributed-executor-backend", "launcher of ranks"),
        ("--base-gpu-id", "first GPU"),
        ("--gpu-id-step", "distance between GPUs"),
        ("--all2all-backend", "expert exchange library"),
        ("--deepep-mode", "mode of the expert exchange library"),
        ("--low-latency-max-num-tokens-per-gpu", "token limit of the low latency exchange"),
        ("--comm-fusion-max-num-tokens", "token limit of fused collectives"),
        ("--enable-allreduce-fusion", "all-reduce fused with the norm"),
        ("--disable-custom-all-reduce", "no all-reduce kernel of our own"),
        ("--disable-nccl-nvls", "no NVLink multicast"),
        ("--disable-symm-mem", "no symmetric memory"),
        ("--force-deterministic-rsag", "deterministic reduce-scatter"),
        ("--disable-sampling-tp-sync", "no agreement on sampled tokens between ranks"),
        ("--enable-p2p-check", "check of peer access"),
        ("--disable-flashinfer-cutlass-moe-fp4-allgather", "no 4-bit gather for experts"),
        ("--dp-sampling", "sampling spread over ranks"),
        ("--dp-sampling-min-bs", "smallest batch whose sampling is spread"),
        ("--emulate-rank-zero", "one rank of many on one GPU"),
        ("--init-expert-location", "initial placement of experts"),
        ("--ep-num-redundant-experts", "copies of busy experts"),
        ("--ep-dispatch-algorithm", "choice between expert copies"),
        ("--eplb-algorithm", "expert balancing method"),
        ("--enable-eplb", "expert balancing"),
        ("--expert-distribution-recorder-mode", "recording of expert use"),
        ("--expert-distribution-recorder-buffer-size", "buffer of the recording of expert use"),
        ("--enable-expert-distribution-metrics", "metrics of expert use"),
    ),
    *_all(
        "disaggregated serving is not built yet; leave the flag out",
        ("--pd-disaggregation", "separate prefill and decode engines"),
        ("--prefill", "address of a prefill engine"),
        ("--decode", "address of a decode engine"),
        ("--disaggregation-mode", "role of this engine"),
        ("--disaggregation-bootstrap-port", "port of the KV transfer"),
        ("--disaggregation-transfer-backend", "library of the KV transfer"),
        ("--disaggregation-ib-device", "network device of the KV transfer"),
        ("--disaggregation-layerwise-interval", "layers a KV transfer"),
        ("--pdlb-url", "address of a load balancer"),
    ),
)

_LOGS = (
    *_all(
        "requests are logged only with --enable-log-requests; leave the flag out",
        ("--log-requests-level", "detail of the request log"),
        ("--max-log-len", "length of a logged prompt"),
        ("--uvicorn-log-level", "separate log level of the HTTP server; use --log-level"),
    ),
    *_all(
        "use --no-enable-metrics to turn metrics off",
        ("--disable-log-stats", "no statistics in vLLM's spelling"),
        ("--metrics-reporters", "where metrics go; Prometheus' `/metrics` is always served"),
    ),
    *_all(
        "this log is not built yet; `/metrics` has totals",
        ("--enable-log-request-stats", "one line of timings a request"),
    ),
    *_all(
        "logprobs are always available; leave the flag out",
        ("--max-logprobs", "limit of top_logprobs (20 here)"),
    ),
    *_all("profiler ranges are not built yet; leave the flag out", ("--enable-nvtx", "profiler ranges")),
    *_all(
        "TLS is not built in; put a reverse proxy in front",
        ("--ssl-keyfile --ssl-certfile --ssl-ca-certs", "TLS of the HTTP server"),
    ),
    *_all("put a reverse proxy in front", ("--root-path", "path prefix behind a proxy")),
)

REFUSED: tuple[Refused, ...] = (
    *_SERVING, *_LOADING, *_MEMORY, *_GRAPHS, *_KERNELS, *_SPECULATION, *_PARALLELISM, *_LOGS,
)  # fmt: skip


@cache
def _by_name() -> dict[str, Refused]:
    return {name: refused for refused in REFUSED for name in refused.names}


def refused_names() -> list[str]:
    """All refused spellings, sorted."""
    return sorted(_by_name())


def find_refusal(name: str) -> Refused | None:
    """The refusal of a spelling; `--no-x` is found by `--x`. None: not a known flag."""
    known = _by_name()
    if name in known:
        return known[name]
    return known.get("--" + name[len("--no-") :]) if name.startswith("--no-") else None
