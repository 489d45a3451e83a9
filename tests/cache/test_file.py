"""Saved caches: a write is atomic, and a file is accepted only for the weights it was computed
with."""

from __future__ import annotations

import os
import re

import pytest
import torch
from apart import run_apart
from on_cpu import on_cpu
from safetensors.torch import load_file
from tiny import llama, reference, save

from exkv import Cache, Cache8bit, Checkpoint, Model
from exkv.cache import file as cache_file

IDS = torch.randint(3, 320, (2, 20), generator=torch.Generator().manual_seed(4))


def opened(folder) -> Model:
    return on_cpu(folder, max_input_len=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(reference(llama(num_hidden_layers=2)), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return opened(folder)


def filled(model, kind=Cache) -> Cache:
    cache = kind(model, 32, 2)
    model.forward(IDS, cache, new_lens=[20, 9])
    return cache


@pytest.mark.parametrize("kind", [Cache, Cache8bit])
def test_the_safetensors_library_reads_what_is_written(model, tmp_path, kind):
    cache = filled(model, kind)
    cache.save(tmp_path / "cache")
    found = load_file(tmp_path / "cache")
    assert set(found) == {f"layers.{i}.{n}" for i in (0, 1) for n in cache.layers[0].tensors}
    for index, layer in enumerate(cache.layers):
        for name, tensor in layer.tensors.items():
            assert torch.equal(found[f"layers.{index}.{name}"], tensor[:, :20])


def test_any_changed_byte_is_detected(model, tmp_path):
    cache, file = filled(model), tmp_path / "cache"
    cache.save(file)
    kept, good = [layer.tensors["k"].clone() for layer in cache.layers], file.read_bytes()
    size = 8 + int.from_bytes(good[:8], "little")
    tokens = re.search(rb"sequences\D+(\d)", good).start(1)  # a digit of a token's number
    for place in (tokens, size, (size + len(good)) // 2, len(good) - 1):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match="checksum is .* the file is damaged"):
            cache.load(file)
    assert all(torch.equal(a.tensors["k"], b) for a, b in zip(cache.layers, kept, strict=True))
    file.write_bytes(good)
    cache.load(file)
    assert cache.sequences[1] == IDS[1, :9].tolist()


def test_symbolic_links_and_permissions_are_kept(model, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real", tmp_path / "link"
    link.symlink_to(target)
    cache = filled(model)
    for _ in range(2):
        cache.save(link)
        assert link.is_symlink() and not target.is_symlink()
        assert os.listdir(tmp_path / "elsewhere") == ["real"]
        target.chmod(0o640)
    assert target.stat().st_mode & 0o777 == 0o640
    Cache(model, 32, 2).load(link)


@pytest.mark.parametrize("named", [False, True], ids=["without a name", "with one"])
def test_failed_write_leaves_the_old_file_and_no_other(model, tmp_path, monkeypatch, named):
    if named:
        monkeypatch.setattr(cache_file, "_without_name", lambda folder: None)
    cache = filled(model)
    cache.save(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()

    def full(stream, tensors, about):
        stream.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file, "_write", full)
    with pytest.raises(
        OSError, match=r"cache: [\d,]+ bytes .* \(No space left.*unchanged"
    ) as error:
        cache.save(tmp_path / "cache")
    assert error.value.errno == 28
    assert os.listdir(tmp_path) == ["cache"] and (tmp_path / "cache").read_bytes() == before


KILLED = """
from exkv.cache import file
if {named}:
    file._without_name = lambda folder: None
with file.replacing(Path({path!r})) as stream:
    stream.write(b"x" * 100_000)
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def knows_files_without_names(folder) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except (OSError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("named", [False, True], ids=["without a name", "with one"])
def test_leftovers_of_killed_writers_are_removed(model, tmp_path, monkeypatch, named):
    (tmp_path / "cache").write_text("before")
    (tmp_path / ".cache.of another").write_text("stays")
    program = KILLED.format(path=str(tmp_path / "cache"), named=named)
    done = run_apart(f"import os, signal\nfrom pathlib import Path\n{program}")
    assert done.returncode == -9
    assert (tmp_path / "cache").read_text() == "before"
    left = set(os.listdir(tmp_path)) - {"cache", ".cache.of another"}
    assert len(left) == (named or not knows_files_without_names(tmp_path))
    if named:
        monkeypatch.setattr(cache_file, "_without_name", lambda folder: None)
    with cache_file.replacing(tmp_path / "cache") as other:  # who still writes loses nothing
        other.write(b"early")
        filled(model).save(tmp_path / "cache")
    assert sorted(os.listdir(tmp_path)) == [".cache.of another", "cache"]
    assert (tmp_path / "cache").read_bytes() == b"early"


FULL = """
from exkv import Cache, Model
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = Model({folder!r})
model.load(devices=["cpu"])
cache = Cache(model, 32)
model.forward(torch.arange(3, 23)[None], cache)
try:
    cache.save({path!r})
except OSError as error:
    print(error)
"""


def test_full_disk_error_has_the_number_of_bytes(folder, tmp_path):
    """The operating system's own error, in the middle of the file."""
    (tmp_path / "cache").write_text("before")
    program = FULL.format(folder=str(folder), path=str(tmp_path / "cache"))
    done = run_apart(f"import resource, signal, torch\n{program}")
    assert "cache: 20,480 bytes of cache could not be written there (File too large)" in done.stdout
    assert os.listdir(tmp_path) == ["cache"] and (tmp_path / "cache").read_text() == "before"


def test_non_regular_files_are_refused(model, tmp_path):
    cache = filled(model)
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path, tmp_path / "pipe"):
        for call in (cache.save, cache.load):
            with pytest.raises(ValueError, match="is not a regular file"):
                call(path)
    assert not os.path.isfile("/dev/null")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cache.save(tmp_path / "nowhere" / "cache")


def test_the_cache_of_other_weights_of_the_same_shape_is_refused(model, tmp_path):
    cache = filled(model)
    cache.save(tmp_path / "cache")
    other = opened(save(reference(llama(num_hidden_layers=2), seed=1), tmp_path / "other"))
    taken = Cache(other, 32, 2)
    with pytest.raises(ValueError, match="computed with other weights"):
        taken.load(tmp_path / "cache")
    assert taken.seq_lens == [0, 0]


def test_a_fingerprint_is_that_of_the_weights_not_of_their_files(folder, tmp_path):
    whole = Checkpoint(folder)
    model = reference(llama(num_hidden_layers=2))
    shards = Checkpoint(save(model, tmp_path / "shards", max_shard_size="200KB"))
    assert len({shards.info(name).file for name in shards.names()}) > 1
    assert shards.fingerprint == whole.fingerprint
    with torch.no_grad():
        model.model.norm.weight[-1] += 1
    assert Checkpoint(save(model, tmp_path / "changed")).fingerprint != whole.fingerprint


def test_files_of_other_versions_are_refused(model, tmp_path, monkeypatch):
    cache = filled(model)
    monkeypatch.setattr(cache_file, "_FORMAT", "exkv cache 1")
    cache.save(tmp_path / "cache")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format is 'exkv cache 1', and this exkv reads"):
        cache.load(tmp_path / "cache")
