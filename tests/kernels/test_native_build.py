"""Compiling, caching and loading: broken caches, missing compilers, unusable folders, two builders at once, exits."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_support import HAS_COMPILER

from tokenspeed.kernels.cpu.native import build as build_module
from tokenspeed.kernels.cpu.native import context as context_module
from tokenspeed.kernels.cpu.native.build import DIGEST, LIBRARY, BuildFailed, build, cache_folders
from tokenspeed.kernels.cpu.native.library import Library
from tokenspeed.kernels.registry import Need, select_ops

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
NEED = Need(torch.device("cpu"), torch.bfloat16)
QUICK = ("-O0", "-DTS_PORTABLE")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    context_module._built.cache_clear()
    yield
    context_module._built.cache_clear()


def test_without_a_compiler_torch_serves_and_the_log_says_why(no_compiler: None) -> None:
    with pytest.raises(BuildFailed, match="no C compiler"):
        build()
    ops, report = select_ops(NEED)
    assert ops.recorder is None
    (line,) = (line for line in report if "native_cpu: no C compiler (install gcc or clang, or set CC)" in line)
    assert line.startswith("embedding: torch_cpu (not native_cpu: ")
    (other,) = (line for line in report if line.startswith("rms_norm: "))
    assert other.startswith("rms_norm: torch_cpu (not native_cpu: as for embedding")


def test_a_cc_that_names_nothing_is_named(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent/gcc")
    with pytest.raises(BuildFailed, match=r"CC is '/nonexistent/gcc', which is no program here"):
        build()


def test_other_needs_are_refused_in_words() -> None:
    assert "float32" in str(context_module.why_not(Need(torch.device("cpu"), torch.float32)))
    fp8_cache = Need(torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn)
    refused = {i.op for i in context_module.IMPLEMENTATIONS if "float8_e4m3fn" in str(i.why_not(fp8_cache))}
    assert refused == {"qkv_rope_cache", "paged_attention"}
    assert "cuda" in str(context_module.why_not(Need(torch.device("cuda"), torch.bfloat16)))


@needs_compiler
def test_all_operations_are_chosen_and_share_one_context() -> None:
    ops, report = select_ops(NEED)
    served = {implementation.op for implementation in context_module.IMPLEMENTATIONS}
    assert {"linear", "block_linear", "recorder"} < served
    assert {line.removesuffix(": native_cpu") for line in report} >= served, report
    contexts = {id(ops.rms_norm.__self__), id(ops.linear.__self__), id(ops.block_linear._context)}
    assert contexts == {id(context_module.context_for(NEED, torch.get_num_threads()))}
    assert ops.recorder is context_module.context_for(NEED, torch.get_num_threads()).recorder


@needs_compiler
def test_shapes_without_native_form_are_served_by_the_next_implementation() -> None:
    ops, _ = select_ops(NEED)
    x, weight = torch.randn(300, 64).to(torch.bfloat16), torch.randn(48, 64).to(torch.bfloat16)
    out = ops.linear(x, weight, None)
    assert (out.float() - x.float() @ weight.float().t()).norm() / out.float().norm() < 0.01
    turned = torch.randn(64, 3).to(torch.bfloat16).t()
    assert torch.isfinite(ops.rms_norm(turned, weight[0], 1e-5)).all()


@needs_compiler
def test_a_second_build_comes_from_the_cache_and_a_broken_one_is_made_again(tmp_path: Path) -> None:
    path = build(QUICK, [tmp_path])
    made = path.stat().st_mtime_ns
    assert build(QUICK, [tmp_path]) == path and path.stat().st_mtime_ns == made
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(broken)
        assert build(QUICK, [tmp_path]) == path
        assert path.stat().st_size == len(whole)
    (path.parent / DIGEST).unlink()
    assert build(QUICK, [tmp_path]) == path and (path.parent / DIGEST).exists()
    Library(path, 2).run(b"", 0)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.parent.name], "work folders are removed"


@needs_compiler
def test_flags_are_part_of_the_key(tmp_path: Path) -> None:
    assert build(QUICK, [tmp_path]) != build((*QUICK, "-DTS_TEST"), [tmp_path])


@needs_compiler
def test_an_unusable_folder_is_passed_over(tmp_path: Path) -> None:
    """A file in the way stands for a folder that cannot be written: root, whom permissions do not stop, runs tests."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)  # anybody could put a library there
    good = tmp_path / "good"
    assert build(QUICK, [blocked, shared, good]).is_relative_to(good)
    with pytest.raises(BuildFailed, match="set TOKENSPEED_CACHE"):
        build(QUICK, [blocked, shared])


def test_cache_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENSPEED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folders()[0] == Path.home() / ".cache" / "tokenspeed"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folders()[0] == Path("/x/tokenspeed")
    monkeypatch.setenv("TOKENSPEED_CACHE", "/t")
    assert cache_folders()[0] == Path("/t")
    assert str(os.getuid()) in cache_folders()[-1].name


def test_a_failing_compiler_is_reported_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(BuildFailed, match="no such thing"):
        build(QUICK, [tmp_path / "cache"])
    monkeypatch.setattr(build_module, "find_compiler", lambda: str(tmp_path / "absent"))
    with pytest.raises(BuildFailed, match="did not run"):
        build(QUICK, [tmp_path / "cache"])


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / LIBRARY
    wrong.write_text("not a library")
    with pytest.raises(BuildFailed, match="do not load"):
        Library(wrong, 1)


@needs_compiler
def test_two_processes_build_at_once_and_exit_cleanly(tmp_path: Path) -> None:
    """Also: threads that are asleep or spinning when the interpreter ends do not crash or hang it."""
    code = f"""
from pathlib import Path
from tokenspeed.kernels.cpu.native.build import build
from tokenspeed.kernels.cpu.native.library import Library
library = Library(build({QUICK!r}, [Path({str(tmp_path)!r})]), 3)
library.run(b"", 0)
print("done")
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for run in runs:
        out, err = run.communicate(timeout=100)
        assert (run.returncode, out, err) == (0, "done\n", "")
    assert len(list(tmp_path.iterdir())) == 1
