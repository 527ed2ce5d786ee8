"""`ServerArgs`: what a user can ask for of the HTTP server, the logs and the start; `args.EngineArgs` extends it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.config.flags import flag, integer, number

API = "HTTP API"
LOGS = "Logs and start"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Wishes that leave the engine as it is. Values are checked by `EngineArgs`."""

    # --- HTTP API --------------------------------------------------------------------------------------------------
    host: str = flag("127.0.0.1", "--host", API, "Address to listen on; 0.0.0.0 for every network.", metavar="ADDRESS")
    port: int = flag(
        8000,
        "--port",
        API,
        "Port to listen on; 0 takes a free one and prints it.",
        parse=integer,
        metavar="PORT",
        at_least=0,
        at_most=65535,
    )
    served_model_name: tuple[str, ...] = flag(
        (),
        "--served-model-name",
        API,
        "Names that requests may use in `model`; the first is the one answered with.",
        kind="values",
        metavar="NAME",
        default_text="the model as typed",
    )
    weight_version: str = flag(
        "default",
        "--weight-version",
        API,
        "Name of these weights, which answers carry as `system_fingerprint`.",
        metavar="NAME",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "--api-key",
        API,
        "Keys accepted as `Authorization: Bearer KEY`.",
        kind="values",
        metavar="KEY",
        is_secret=True,
        default_text="no authentication",
    )
    cors_allow_origins: tuple[str, ...] = flag(
        (),
        "--cors-allow-origins --allowed-origins",
        API,
        "Web origins that may call the API from a browser; `*` for all. A JSON list is accepted too.",
        kind="values",
        metavar="ORIGIN",
    )
    max_request_mb: float = flag(
        32.0,
        "--max-request-mb",
        API,
        "Largest request body in MiB; larger ones are answered 413.",
        parse=number,
        metavar="MIB",
        at_least=0.001,
        at_most=4096,
    )
    stream_interval: int = flag(
        1,
        "--stream-interval",
        API,
        "Tokens that a streamed event carries at least, the last one excepted.",
        parse=integer,
        metavar="TOKENS",
        at_least=1,
    )
    chat_template: str | None = flag(
        None,
        "--chat-template",
        API,
        "File with a Jinja chat template, the template itself, or the name of one that comes with the model (`rag`) or "
        "with the package (`chatml`, `chatml-tools`).",
        metavar="FILE",
        default_text="the model's own",
    )
    reasoning_parser: str = flag(
        "auto",
        "--reasoning-parser",
        API,
        "How the model writes reasoning. `auto` goes by architecture and chat template; `passthrough` leaves it in the "
        "text. Names: docs/serving/reasoning-and-tools.md.",
        metavar="NAME",
    )
    tool_call_parser: str = flag(
        "auto",
        "--tool-call-parser",
        API,
        "How the model writes tool calls. `auto` goes by architecture and chat template; `passthrough` leaves them in "
        "the text. Names: docs/serving/reasoning-and-tools.md.",
        metavar="NAME",
    )
    enable_auto_tool_choice: bool = flag(
        False,
        "--enable-auto-tool-choice",
        API,
        "Let the model decide about tool calls. Always the case here; accepted so that commands carry over.",
        kind="on",
        default_text="always on",
    )
    drain_timeout: float = flag(
        30.0,
        "--drain-timeout",
        API,
        "Seconds after SIGTERM in which running requests may finish.",
        parse=number,
        metavar="SECONDS",
        at_least=0,
        at_most=86400,
    )

    # --- logs and start --------------------------------------------------------------------------------------------
    log_level: str = flag(
        "info", "--log-level", LOGS, "What is logged at least.", choices=("debug", "info", "warning", "warn", "error")
    )
    enable_log_requests: bool = flag(
        False,
        "--enable-log-requests",
        LOGS,
        "One log line a request (without its text).",
        kind="on_or_off",
        more_off_names=("--disable-log-requests",),
    )
    enable_metrics: bool = flag(
        True, "--enable-metrics", LOGS, "Serve Prometheus metrics at `/metrics`.", kind="on_or_off"
    )
    decode_log_interval: int = flag(
        40,
        "--decode-log-interval",
        LOGS,
        "Decode steps from one `Decode batch.` line of the log to the next; steps with prompts have a line each at "
        "`--log-level debug`.",
        parse=integer,
        metavar="STEPS",
        at_least=1,
    )
    engine_startup_timeout: float = flag(
        1800.0,
        "--engine-startup-timeout",
        LOGS,
        "Seconds that loading the model may take.",
        parse=number,
        metavar="SECONDS",
        at_least=1,
        at_most=10**6,
    )
    dry_run: bool = flag(
        False,
        "--dry-run",
        LOGS,
        "Print the resolved configuration with the reason of each choice that is made before the start, and leave.",
        kind="on",
    )
