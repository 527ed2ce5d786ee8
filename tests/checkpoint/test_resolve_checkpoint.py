"""Model names to files: every kind of name, and an error that says what to do for every kind of mistake."""

import json

import pytest

from tokenspeed.checkpoint import hub, resolve
from tokenspeed.checkpoint.resolve import resolve_checkpoint, resolve_tokenizer
from tokenspeed.protocol.errors import CheckpointError, ConfigError


def folder_with(tmp_path, *names: str, **contents: object):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def index_of(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_safetensors(tmp_path):
    folder_with(tmp_path, "model.safetensors", config={})
    found = resolve_checkpoint(str(tmp_path))
    assert (found.name, found.format) == (str(tmp_path), "safetensors")
    assert found.weight_files == (str(tmp_path / "model.safetensors"),)
    assert found.config_path == str(tmp_path / "config.json")
    assert found.tokenizer_path == str(tmp_path)


def test_sharded_safetensors_lists_each_file_once_in_order(tmp_path):
    folder_with(tmp_path, "b.safetensors", "a.safetensors", config={})
    index_of(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    assert resolve_checkpoint(str(tmp_path)).weight_files == tuple(str(tmp_path / f"{n}.safetensors") for n in "ab")


def test_missing_shard_is_named(tmp_path):
    folder_with(tmp_path, "a.safetensors", config={})
    index_of(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"names 2 shards, but b\.safetensors is missing; finish the download"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "", "..", "x.bin", 5])
def test_index_cannot_leave_the_folder(tmp_path, file):
    folder_with(tmp_path, "a.safetensors", config={})
    index_of(tmp_path, {"x": file})
    with pytest.raises(CheckpointError, match="expected the plain name"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_weight_map(tmp_path, weight_map):
    folder_with(tmp_path, "a.safetensors", config={})
    index_of(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        resolve_checkpoint(str(tmp_path))


def test_numbered_shards_without_index(tmp_path):
    folder_with(tmp_path, "model-00001-of-00002.safetensors", config={})
    with pytest.raises(CheckpointError, match=r"one of 2 shards, but model-00002-of-00002\.safetensors is missing"):
        resolve_checkpoint(str(tmp_path))
    folder_with(tmp_path, "model-00002-of-00002.safetensors")
    assert len(resolve_checkpoint(str(tmp_path)).weight_files) == 2


def test_several_safetensors_without_index(tmp_path):
    folder_with(tmp_path, "one.safetensors", "two.safetensors", config={})
    with pytest.raises(
        CheckpointError, match=r"several safetensors files and no .*: one\.safetensors, two\.safetensors"
    ):
        resolve_checkpoint(str(tmp_path))


def test_missing_config(tmp_path):
    folder_with(tmp_path, "model.safetensors", adapter_config={})
    with pytest.raises(CheckpointError, match=r"config\.json is missing; it looks like a LoRA adapter"):
        resolve_checkpoint(str(tmp_path))


def test_broken_index_json(tmp_path):
    folder_with(tmp_path, "a.safetensors", config={})
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: not valid JSON"):
        resolve_checkpoint(str(tmp_path))


def test_gguf_file_and_folder(tmp_path):
    folder_with(tmp_path, "m.gguf")
    for name in (tmp_path, tmp_path / "m.gguf"):
        found = resolve_checkpoint(str(name))
        assert found.format == "gguf"
        assert found.weight_files == (str(tmp_path / "m.gguf"),)
        assert found.tokenizer_path == found.config_path == str(tmp_path / "m.gguf")


def test_several_gguf_files_are_listed(tmp_path):
    folder_with(tmp_path, "a.gguf", "b.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files: a\.gguf, b\.gguf\. Name one"):
        resolve_checkpoint(str(tmp_path))


def test_split_gguf(tmp_path):
    folder_with(tmp_path, "m-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing"):
        resolve_checkpoint(str(tmp_path))
    folder_with(tmp_path, "m-00002-of-00002.gguf")
    parts = tuple(str(tmp_path / f"m-0000{i}-of-00002.gguf") for i in (1, 2))
    for name in (tmp_path, *parts):
        found = resolve_checkpoint(str(name))
        assert found.weight_files == parts
        assert found.config_path == parts[0]


def test_safetensors_win_over_gguf_unless_asked(tmp_path):
    folder_with(tmp_path, "m.gguf", "model.safetensors", config={})
    assert resolve_checkpoint(str(tmp_path)).format == "safetensors"
    assert resolve_checkpoint(str(tmp_path), load_format="gguf").format == "gguf"


def test_pickles_are_refused_by_name(tmp_path):
    folder_with(tmp_path, "pytorch_model.bin", config={})
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin.*convert them to safetensors"):
        resolve_checkpoint(str(tmp_path))


def test_neither_file_nor_folder():
    """A device or a pipe was taken for a folder and listed: a traceback."""
    with pytest.raises(CheckpointError, match=r"/dev/null: expected a folder with config\.json"):
        resolve_checkpoint("/dev/null")


def test_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected config\.json with model\.safetensors.*an empty folder"):
        resolve_checkpoint(str(tmp_path))


def test_dummy_needs_only_a_config(tmp_path):
    folder_with(tmp_path, config={}, other={})
    for name in (tmp_path, tmp_path / "config.json", tmp_path / "other.json"):
        found = resolve_checkpoint(str(name), load_format="dummy")
        assert (found.format, found.weight_files, found.tokenizer_path) == ("config", (), str(tmp_path))
    with pytest.raises(CheckpointError, match=r"load format dummy needs a config\.json"):
        resolve_checkpoint(str(tmp_path.parent), load_format="dummy")


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "missing", "a/b/c", "missing.json", "org/name:"])
def test_missing_local_path(name, monkeypatch):
    monkeypatch.setattr(resolve, "download", lambda *args, **named: pytest.fail("must not ask the hub"))
    with pytest.raises(CheckpointError, match=r"does not exist here.*org/name"):
        resolve_checkpoint(name)


def test_file_of_another_kind(tmp_path):
    folder_with(tmp_path, "model.bin")
    with pytest.raises(CheckpointError, match=r"expected a folder .* or a \.gguf file"):
        resolve_checkpoint(str(tmp_path / "model.bin"))


def test_arguments_that_do_not_apply(tmp_path):
    folder_with(tmp_path, "m.gguf")
    with pytest.raises(ConfigError, match="'npcache' is not supported; choose one of auto"):
        resolve_checkpoint(str(tmp_path), load_format="npcache")
    with pytest.raises(ConfigError, match="revision 'v1' applies to hub repositories"):
        resolve_checkpoint(str(tmp_path), revision="v1")
    with pytest.raises(ConfigError, match="revision 'v1' applies to hub repositories"):
        resolve_checkpoint(None, revision="v1")
    with pytest.raises(ConfigError, match="GGUF file; load format safetensors cannot read it"):
        resolve_checkpoint(None, load_format="safetensors")
    with pytest.raises(ConfigError, match="GGUF file; load format safetensors cannot read it"):
        resolve_checkpoint(str(tmp_path / "m.gguf"), load_format="safetensors")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", ("org/name", None)),
        ("org/na.me-2_x", ("org/na.me-2_x", None)),
        ("org/name:file-Q4.gguf", ("org/name", "file-Q4.gguf")),
        ("org/name/sub/file.gguf", ("org/name", "sub/file.gguf")),
        ("name", None),
        ("org/name/sub", None),
        ("org/../x", None),
        ("org/name:", None),
    ],
)
def test_hub_names(name, expected):
    assert hub.split_hub_name(name) == expected


class FakeHub:
    """Stands for `download`: remembers what was asked and offers a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []

    def __call__(self, repo, patterns, revision, cache_dir, top_level):
        self.asked.append((repo, patterns, revision, cache_dir, top_level))
        return self.folder


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(resolve, "download", fake)
    return fake


def test_hub_repository(fake_hub):
    folder_with(fake_hub.folder, "model.safetensors", config={})
    found = resolve_checkpoint("org/name", revision="v2", download_dir="/somewhere")
    assert found.name == "org/name"
    [(repo, patterns, revision, cache_dir, top_level)] = fake_hub.asked
    assert (repo, revision, cache_dir, top_level) == ("org/name", "v2", "/somewhere", True)
    assert "*.safetensors" in patterns
    assert "*.bin" not in patterns


def test_hub_dummy_brings_no_weights(fake_hub):
    folder_with(fake_hub.folder, config={})
    assert resolve_checkpoint("org/name", load_format="dummy").format == "config"
    assert not any("safetensors" in pattern for pattern in fake_hub.asked[0][1])


def test_hub_gguf_file(fake_hub):
    folder_with(fake_hub.folder, "m.gguf")
    assert resolve_checkpoint("org/name:m.gguf").weight_files == (str(fake_hub.folder / "m.gguf"),)
    assert fake_hub.asked[0][1] == ("m.gguf",)
    with pytest.raises(CheckpointError, match=r"org/name has no file 'n\.gguf'"):
        resolve_checkpoint("org/name:n.gguf")


def test_hub_split_gguf_asks_for_all_parts(fake_hub):
    folder_with(fake_hub.folder, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert len(resolve_checkpoint("org/name:m-00002-of-00002.gguf").weight_files) == 2
    assert fake_hub.asked[0][1] == ("m-*-of-00002.gguf",)


def test_hub_repository_without_safetensors(fake_hub):
    folder_with(fake_hub.folder, config={})
    with pytest.raises(CheckpointError, match=r"has no safetensors files\. If it holds GGUF files, name one"):
        resolve_checkpoint("org/name")
    with pytest.raises(ConfigError, match="needs the file's name"):
        resolve_checkpoint("org/name", load_format="gguf")
    with pytest.raises(CheckpointError, match=r"a \.gguf file of org/name is expected, found 'x\.bin'"):
        resolve_checkpoint("org/name:x.bin")


@pytest.fixture
def no_network(monkeypatch):
    """The real hub client, allowed to look into its cache only."""
    original = hub.snapshot_download
    monkeypatch.setattr(hub, "snapshot_download", lambda repo, **named: original(repo, local_files_only=True, **named))


def test_offline_and_missing_says_what_to_do(tmp_path, no_network):
    with pytest.raises(CheckpointError, match=r"not in the local hub cache.*hf download no-one/nothing") as caught:
        resolve_checkpoint("no-one/nothing", download_dir=str(tmp_path))
    assert "tokenspeed serve /path/to/folder" in str(caught.value)


def test_hub_cache_is_used_without_network(tmp_path, no_network):
    """A snapshot laid out as the hub client does it is found with no network."""
    commit = "0" * 40
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    folder_with(snapshot, "model.safetensors", config={})
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    found = resolve_checkpoint("org/name", download_dir=str(tmp_path))
    assert found.weight_files == (str(snapshot / "model.safetensors"),)


def test_tokenizer_alone(tmp_path, fake_hub):
    folder_with(tmp_path, "m.gguf", tokenizer={})
    assert resolve_tokenizer(str(tmp_path)) == str(tmp_path)
    assert resolve_tokenizer(str(tmp_path / "m.gguf")) == str(tmp_path / "m.gguf")
    assert fake_hub.asked == []
    assert resolve_tokenizer("org/name", revision="v1") == str(tmp_path)
    [(repo, patterns, revision, _, _)] = fake_hub.asked
    assert (repo, revision) == ("org/name", "v1")
    assert not any("safetensors" in pattern for pattern in patterns)
    assert resolve_tokenizer("org/name:m.gguf") == str(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="is not a folder here"):
        resolve_tokenizer("./missing")
    with pytest.raises(ConfigError, match="revision 'v1' applies to hub"):
        resolve_tokenizer(str(tmp_path), revision="v1")
