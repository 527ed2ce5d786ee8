"""The HTTP server's resolved configuration: frozen, separate from the engine's."""

from __future__ import annotations

from typing import Literal

import msgspec


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the server process runs with.

    Fields:
        host, port: where to listen; port 0 = any free one (printed when ready).
        served_model_names: names accepted in `model`; the first is the one answered with. Other names get 404.
        weight_version: what answers call these weights (`system_fingerprint`).
        api_keys: accepted bearer keys; empty = no authentication.
        cors_allow_origins: empty = no CORS headers.
        max_request_bytes: a larger body is answered 413 before it is read.
        drain_timeout_s: seconds between SIGTERM and ending what still streams.
        chat_template: template text that replaces the model's own, or None.
        reasoning_parser, tool_call_parser: names of formats in `text/parsers`, or auto.
        stream_interval: tokens a stream event carries at least, except the last.
        enable_metrics: serve `/metrics`.
        allow_priority: the engine schedules by priority, so requests may say one. Elsewhere it would be ignored, and is
            refused instead.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...]
    weight_version: str = "default"
    api_keys: tuple[str, ...] = ()
    cors_allow_origins: tuple[str, ...] = ()
    max_request_bytes: int = 32 * 2**20
    drain_timeout_s: float = 30.0
    chat_template: str | None = None
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    stream_interval: int = 1
    enable_metrics: bool = True
    allow_priority: bool = False
    log_requests: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
