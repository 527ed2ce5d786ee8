"""`/start_profile` and `/stop_profile`: a Chrome trace of the engine's steps, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from tokenspeed.protocol.errors import EngineDead, InvalidRequest
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.server.body import read_json, to_struct
from tokenspeed.server.context import ServerContext
from tokenspeed.server.errors import DEAD_MESSAGE
from tokenspeed.server.responses import json_response
from tokenspeed.server.schema import documented

TIMEOUT_S = 600.0
"""Writing a trace of many steps takes long."""

# Known from other servers, and why a value that asks for something is refused.
_REFUSED: Mapping[str, str] = {
    "start_step": "a profile starts with the next step; send the request when it is time",
    "profile_by_stage": "a trace holds prompt and decode steps alike; each step is named in it",
}
_ACTIVITIES: Mapping[str, Literal["CPU", "GPU"]] = {"CPU": "CPU", "GPU": "GPU"}
_OTHER_ACTIVITIES = ("MEM", "CUDA_PROFILER", "VIZTRACER", "PROTON")


class StartProfileRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to record and where to; see `protocol.messages.ProfileOptions`. Every field may be left out.

    Fields:
        start_step, profile_by_stage: known from other servers and refused, unless null or false.
    """

    output_dir: Annotated[str, Meta(min_length=1)] | None = None
    num_steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: Annotated[str, Meta(min_length=1)] | None = None
    start_step: int | None = None
    profile_by_stage: bool | None = None


class ProfileResult(msgspec.Struct, kw_only=True):
    """What became of the command; `file` is the trace's."""

    success: bool
    message: str
    file: str | None = None


def router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to a server."""
    routes = APIRouter()

    @routes.post("/start_profile", **documented("Operations", StartProfileRequest, ProfileResult))
    async def start_profile(request: Request) -> Response:
        """Record the engine's steps from the next one on, until `/stop_profile` or for `num_steps`. The answer names
        the file that the trace will be written to, on the server. 400 when that cannot be done."""
        fields = await read_json(request) if (await request.body()).strip() else {}
        options = _options(to_struct(fields, StartProfileRequest))
        steps = "until it is stopped" if options.num_steps is None else f"for {options.num_steps} steps"
        return await _command(context, "start_profile", f"recording {steps}", options)

    @routes.post("/stop_profile", **documented("Operations", None, ProfileResult))
    async def stop_profile() -> Response:
        """End the profile and write its trace; the answer names the file. Steps wait while it is written. 400 when no
        profile was started, or no step ran since."""
        return await _command(context, "stop_profile", "the trace is written", None)

    return routes


def _options(asked: StartProfileRequest) -> ProfileOptions:
    for name, why in _REFUSED.items():
        value = getattr(asked, name)
        if value is not None and value is not False:
            raise InvalidRequest(f"{name} is not supported: {why}", param=name)
    activities: list[Literal["CPU", "GPU"]] = []
    for name in asked.activities or ():
        if name in _ACTIVITIES:
            activities.append(_ACTIVITIES[name])
            continue
        why = "is not supported" if name in _OTHER_ACTIVITIES else "is not known"
        raise InvalidRequest(f"activities holds {name[:80]!r}, which {why}; use CPU and GPU", param="activities")
    return ProfileOptions(
        output_dir=asked.output_dir,
        num_steps=asked.num_steps,
        activities=tuple(activities),
        with_stack=asked.with_stack,
        record_shapes=bool(asked.record_shapes),
        profile_id=asked.profile_id,
    )


async def _command(
    context: ServerContext,
    name: Literal["start_profile", "stop_profile"],
    done: str,
    options: ProfileOptions | None,
) -> Response:
    if not context.client.is_alive:
        raise EngineDead(DEAD_MESSAGE)
    ok, text = await context.client.command(name, TIMEOUT_S, options)
    if not ok:
        return json_response(ProfileResult(success=False, message=text or "refused"), 400)
    return json_response(ProfileResult(success=True, message=done, file=text))
