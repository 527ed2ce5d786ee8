"""On a GPU, engines of this folder compile kernels as they meet them: workers for each of a hundred tiny engines would
take minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from law_engine import DEVICE


@pytest.fixture(scope="session", autouse=True)
def no_compile_workers() -> Iterator[None]:
    if DEVICE != "cuda":
        yield
        return
    from tokenspeed.runner import build_cuda
    from tokenspeed.runner.compile import CompileJob

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_cuda, "start_compile", lambda *_: CompileJob(None, None, "kernels: as met"))
        yield
