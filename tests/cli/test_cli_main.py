"""The command itself: dispatch, exit codes, one clean line for a user's error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokenspeed.cli import env, main, version
from tokenspeed.cli.main import SUBCOMMANDS
from tokenspeed.config.device import DeviceInfo


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tokenspeed", *argv], capture_output=True, text=True, check=False)


def test_no_subcommand_prints_help_and_leaves_with_1(capsys):
    assert main.main([]) == 1
    out = capsys.readouterr().out
    for name in SUBCOMMANDS:
        assert name in out


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help(capsys, word):
    assert main.main([word]) == 0
    assert "serve" in capsys.readouterr().out


def test_unknown_subcommand(capsys):
    assert main.main(["sreve"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tokenspeed: error: unknown subcommand 'sreve'")


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_version(capsys, words):
    assert main.main(words) == 0
    assert capsys.readouterr().out.startswith("TokenSpeed v")


@pytest.mark.parametrize("name", ["version", "env"])
def test_help_of_a_subcommand_without_flags(capsys, name):
    """The command's own help promises that each has some."""
    assert main.main([name, "--help"]) == 0
    assert f"usage: tokenspeed {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["version", "env"])
def test_arguments_that_mean_nothing_are_refused(capsys, name):
    assert main.main([name, "x"]) == 2
    assert "takes no arguments" in capsys.readouterr().err


def test_env_report():
    device = DeviceInfo(
        num_cores=4,
        num_physical_cores=2,
        memory_total_bytes=8 * 2**30,
        memory_available_bytes=2**30,
        cpu_name="A CPU",
        cpu_flags=frozenset({"avx2", "fpu"}),
    )
    lines = dict(line.split(": ", 1) for line in env.report(device))
    assert lines["CPU features"] == "avx2"
    assert lines["Cores this process may use"] == "4 (2 physical)"
    assert lines["Memory"] == "8.0 GiB, 1.0 GiB available"
    assert lines["numpy"][0].isdigit()
    assert set(env.PACKAGES) <= set(lines)


def test_version_and_env_load_neither_torch_nor_the_server():
    code = (
        "import sys\nfrom tokenspeed.cli.main import main\nmain(['version']); main(['env'])\n"
        "print([name for name in ('torch', 'fastapi', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_users_error_is_one_line_and_exit_code_2():
    done = run("serve", "--max-num-batched-tokens", "8192")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("tokenspeed: error: known flag --max-num-batched-tokens")


def test_a_reader_that_leaves_is_no_error():
    """`tokenspeed env | head -1` must not end in a traceback."""
    code = "import sys; sys.argv = ['tokenspeed', 'env']; from tokenspeed.cli.main import main; sys.exit(main())"
    child = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), errors) == (0, b"")


def test_interrupt_leaves_with_130(monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(version, "run", interrupted)
    assert main.main(["version"]) == 130


def test_our_own_bugs_keep_their_traceback(monkeypatch):
    def broken(argv):
        raise ZeroDivisionError

    monkeypatch.setattr(version, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main.main(["version"])
