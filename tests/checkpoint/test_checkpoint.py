"""Checkpoint: tensors equal other readers' to the bit, and a clear error for every damaged file."""

import json
import mmap
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from exkv.checkpoint import Checkpoint, CheckpointError, ExpectedTensor, safetensors
from exkv.checkpoint.safetensors import DTYPES, INDEX_NAME, SINGLE_NAME

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def pack(header, data=b""):
    """A file's bytes: `header` as an object or as raw bytes, behind its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def floats(*shape):
    return ExpectedTensor.of_floats(shape, torch.float32)


def write_single(folder, content):
    file = folder / SINGLE_NAME
    file.write_bytes(content)
    return file


def write_index(folder, weight_map):
    file = folder / INDEX_NAME
    file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return file


def as_bytes(tensor):
    """The stored bytes, so that NaNs and signs of zero compare, too."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(tensor, expected):
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    assert as_bytes(tensor) == as_bytes(expected)


def random_bits(dtype, *shape):
    """Any bit pattern, so that NaNs and subnormals are among them; bools stay 0 or 1."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.fixture
def sharded(tmp_path):
    """Three tensors in two shards, with their index."""
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.zeros(2, 2)}
    save_file({"a": tensors["a"], "b": tensors["b"]}, tmp_path / "m-1.safetensors")
    save_file({"c": tensors["c"]}, tmp_path / "m-2.safetensors")
    shards = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    write_index(tmp_path, shards)
    return tmp_path, tensors, shards


def test_every_dtype_and_shape_reads_as_it_was_saved_bit_for_bit(tmp_path):
    tensors = {f"{name}": random_bits(dtype, 3, 5) for name, dtype in DTYPES.items()}
    tensors |= {f"scalar.{d}": random_bits(d) for d in FLOATS}
    tensors |= {"empty": torch.empty(0), "no rows": torch.empty(0, 7, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(tensors)
        assert len(checkpoint) == len(tensors)
        for name, expected in tensors.items():
            assert_same_bits(checkpoint.tensor(name), expected)
            info = checkpoint.info(name)
            assert (info.name, info.dtype, info.shape) == (name, expected.dtype, expected.shape)
            assert info.nbytes == expected.numel() * expected.itemsize
            assert info.file == tmp_path / SINGLE_NAME


@pytest.mark.parametrize("max_shard_size", ["20KB", "10GB"])
def test_a_model_saved_by_transformers_reads_bit_for_bit(max_shard_size, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size == "20KB")

    expected = model.state_dict()
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(expected)
        checkpoint.expect({name: floats(*tensor.shape) for name, tensor in expected.items()})
        for name, tensor in expected.items():
            assert_same_bits(checkpoint.tensor(name), tensor)
            assert checkpoint.info(name).file in files


def test_names_come_in_the_order_of_the_disk(sharded):
    folder, _, _ = sharded
    checkpoint = Checkpoint(folder)
    places = [(checkpoint.info(n).file, checkpoint.info(n).offset) for n in checkpoint.names()]
    assert places == sorted(places)


def test_any_single_file_suffices_and_the_usual_name_wins(tmp_path):
    save_file({"other": torch.ones(1)}, tmp_path / "weights.safetensors")
    assert Checkpoint(tmp_path).names() == ["other"]
    save_file({"usual": torch.ones(1)}, tmp_path / SINGLE_NAME)
    assert Checkpoint(tmp_path).names() == ["usual"]


def test_headers_may_be_read_once_until_a_file_changes(tmp_path, monkeypatch):
    read, read_header = [], safetensors.read_header
    monkeypatch.setattr(
        safetensors, "read_header", lambda file: read.append(file) or read_header(file)
    )
    with safetensors.headers_read_once():
        for size, expected in ((2, 1), (2, 1), (3, 2)):
            if len(read) < expected:
                write_single(
                    tmp_path, pack({"a": entry(shape=[size], end=4 * size)}, bytes(4 * size))
                )
            with Checkpoint(tmp_path) as checkpoint:
                assert checkpoint.info("a").shape == (size,)
            assert len(read) == expected
    Checkpoint(tmp_path).close()
    Checkpoint(tmp_path).close()
    assert len(read) == 4


def test_files_may_be_symbolic_links_out_of_the_folder(sharded, tmp_path_factory):
    blobs, tensors, _ = sharded
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    with Checkpoint(snapshot) as checkpoint:
        for name, expected in tensors.items():
            assert_same_bits(checkpoint.tensor(name), expected)


def test_tensor_is_a_view_over_the_mapping(tmp_path):
    save_file({"a": torch.arange(4.0)}, tmp_path / SINGLE_NAME)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor("a").data_ptr() == checkpoint.tensor("a").data_ptr()


def test_a_write_to_a_tensor_never_reaches_the_file(tmp_path):
    save_file({"a": torch.arange(4.0)}, tmp_path / SINGLE_NAME)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.tensor("a").fill_(9)
    assert load_file(tmp_path / SINGLE_NAME)["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shift", range(1, 8))
def test_misaligned_data_is_read(shift, tmp_path):
    values = torch.arange(5, dtype=torch.float64)
    text = json.dumps({"a": entry("F64", (5,), 0, 40)}).encode()
    text += b" " * (-(8 + len(text)) % 8 + shift)
    write_single(tmp_path, pack(text, as_bytes(values)))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.info("a").offset % 8 == shift
        assert_same_bits(checkpoint.tensor("a"), values)
        assert checkpoint.tensor("a").data_ptr() % 8 == 0


def test_a_file_larger_than_the_memory_can_be_mapped(tmp_path):
    count = 2**38  # half a TiB, sparse
    text = json.dumps({"a": entry("F16", (count,), 0, 2 * count)}).encode()
    text += b" " * (-len(text) % 8)
    file = write_single(tmp_path, pack(text))
    try:
        with open(file, "r+b") as stream:
            stream.truncate(8 + len(text) + 2 * count)
    except OSError:
        pytest.skip("this file system has no sparse file of half a TiB")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor("a")[-1] == 0


def test_tensors_outlive_the_closed_checkpoint(tmp_path):
    save_file({"a": torch.arange(4.0)}, tmp_path / SINGLE_NAME)
    with Checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.tensor("a")
    assert tensor.tolist() == [0, 1, 2, 3]
    assert "a" in checkpoint and checkpoint.info("a").shape == (4,)
    with pytest.raises(ValueError, match="closed"):
        checkpoint.tensor("a")
    checkpoint.close()


def test_mapping_ends_with_its_last_tensor(tmp_path, monkeypatch):
    import weakref

    from exkv.checkpoint import open_file as module

    class Mapping(mmap.mmap):  # mmap itself takes no weak references
        pass

    monkeypatch.setattr(module.mmap, "mmap", Mapping)
    save_file({"a": torch.arange(4.0)}, tmp_path / SINGLE_NAME)
    checkpoint = Checkpoint(tmp_path)
    tensor = checkpoint.tensor("a")
    mapped = weakref.ref(checkpoint._files[tmp_path / SINGLE_NAME].mapped())
    checkpoint.close()
    assert mapped() is not None
    del tensor
    assert mapped() is None


@pytest.mark.parametrize("when", ["before the first tensor", "between two tensors"])
def test_file_truncated_after_opening_raises(when, tmp_path):
    save_file({"a": torch.ones(9000), "b": torch.ones(9000)}, tmp_path / SINGLE_NAME)
    with Checkpoint(tmp_path) as checkpoint:
        if when == "between two tensors":
            checkpoint.tensor("a")
        with open(tmp_path / SINGLE_NAME, "r+b") as stream:
            stream.truncate(500)
        with pytest.raises(CheckpointError, match="to 500; tensor 'b' can't be read"):
            checkpoint.tensor("b")


@pytest.mark.parametrize("how", ["another file in its place", "written to"])
def test_replaced_file_of_the_same_size_is_refused(how, tmp_path):
    file = tmp_path / SINGLE_NAME
    save_file({"a": torch.ones(9), "b": torch.ones(9)}, file)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor("a").tolist() == [1] * 9
        save_file({"a": torch.zeros(9), "b": torch.zeros(9)}, tmp_path / "other")
        if how == "written to":
            file.write_bytes((tmp_path / "other").read_bytes())
        else:
            (tmp_path / "other").rename(file)
        with pytest.raises(CheckpointError, match="replaced or written to .* tensor 'b' can't"):
            checkpoint.tensor("b")
        with pytest.raises(CheckpointError, match="open the checkpoint again"):
            checkpoint.check(["a"])


def test_deleted_file_can_still_be_read(tmp_path):
    save_file({"a": torch.ones(9)}, tmp_path / SINGLE_NAME)
    with Checkpoint(tmp_path) as checkpoint:
        (tmp_path / SINGLE_NAME).unlink()
        target = torch.empty(9)
        checkpoint.read_into("a", target.view(torch.uint8)[:8])
        checkpoint.read_into("a", target.view(torch.uint8)[8:], first=8)
        checkpoint.check(["a"])
        assert target.tolist() == checkpoint.tensor("a").tolist() == [1] * 9


def test_unknown_name_error_suggests_similar_ones(tmp_path):
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / SINGLE_NAME)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weigth'.*model\.norm\.weight"):
        checkpoint.info("model.norm.weigth")
    with pytest.raises(CheckpointError, match="no tensor 'q'"):
        checkpoint.tensor("q")


def test_expect_names_tensor_file_and_both_shapes(sharded):
    folder, _, _ = sharded
    checkpoint = Checkpoint(folder)
    checkpoint.expect({"a": floats(2, 3), "c": floats(2, 2)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.expect({"a": floats(3, 2), "b": floats(4), "q": floats(1, 2)})
    message = str(caught.value)
    assert "2 of 3 tensors" in message and "config.json" in message
    assert "a in m-1.safetensors is [2, 3], expected [3, 2]" in message
    assert "q is missing, expected [1, 2]" in message


def test_expect_lists_only_the_first_few(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE_NAME)
    with pytest.raises(CheckpointError, match="40 of 40.*t4 is missing.*and 35 more") as caught:
        Checkpoint(tmp_path).expect({f"t{i}": floats(1) for i in range(40)})
    assert "t5" not in str(caught.value)


HALF = pack({"a": entry(end=8), "b": entry(begin=8, end=16)}, bytes(16))[:-4]
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

# Each case: a whole file, and what the message has to say.
BAD_FILES = {
    "empty file": (b"", ["0 bytes"]),
    "five bytes": (b"12345", ["5 bytes"]),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
    "header longer than the file": (pack({}, b"")[:-1], ["header of 2 bytes", "9 bytes"]),
    "header without end": (b"\xff" * 64, ["header of 18446744073709551615 bytes"]),
    "header of no bytes": (pack(b""), ["does not start as JSON"]),
    "header after a blank": (pack(b" {}"), ["does not start as JSON"]),
    "header is a list": (pack(b"[]"), ["does not start as JSON"]),
    "header is not JSON": (pack(b'{"a":}'), ["not valid JSON", "char 5"]),
    "header is cut": (pack(b'{"a": {'), ["not valid JSON"]),
    "header is not UTF-8": (pack(b'{"\xff": 1}'), ["UTF-8", "byte 2"]),
    "nested too deeply": (pack(DEEP), ["nested too deeply"]),
    "a number without end": (pack(b'{"a":' + b"9" * 5000 + b"}"), ["not valid JSON"]),
    "a tensor twice": (
        pack(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        ["'a' occurs twice"],
    ),
    "a key of a tensor twice": (
        pack(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        ["'dtype' occurs twice"],
    ),
    "metadata is no object": (pack({"__metadata__": 3}), ["__metadata__"]),
    "metadata null": (pack({"__metadata__": None}), ["__metadata__"]),
    "metadata of numbers": (pack({"__metadata__": {"format": 1}}), ["__metadata__"]),
    "entry is a number": (pack({"a": 1}), ["'a'", "has 1"]),
    "entry without a shape": (pack({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), ["shape"]),
    "entry with another key": (pack({"a": entry() | {"stride": [1]}}, bytes(8)), ["stride"]),
    "unprintable name": (pack({"a\nb": entry()}, bytes(8)), [r"'a\nb'", "printed"]),
    "half a character as a name": (pack(b'{"\\ud800":1}'), ["lone surrogate"]),
    "unknown dtype": (pack({"a": entry("F4")}, bytes(8)), ["'a'", "'F4'", "BF16"]),
    "dtype is a number": (pack({"a": entry(16)}, bytes(8)), ["dtype 16"]),
    "dtype is a list": (pack({"a": entry(["F32"])}, bytes(8)), ["dtype ['F32']"]),
    "shape is a number": (pack({"a": entry() | {"shape": 2}}, bytes(8)), ["shape 2"]),
    "shape of floats": (pack({"a": entry(shape=[2.0])}, bytes(8)), ["shape [2.0]"]),
    "shape of NaN": (pack({"a": entry(shape=[float("nan")])}, bytes(8)), ["shape [nan]"]),
    "shape of bools": (pack({"a": entry(shape=[2, True])}, bytes(8)), ["[2, True]"]),
    "negative sizes": (pack({"a": entry(shape=[-1, -2])}, bytes(8)), ["[-1, -2]"]),
    "too many dimensions": (pack({"a": entry("U8", [1] * 65, 0, 1)}, bytes(1)), ["64 sizes"]),
    "product overflows": (
        pack({"a": entry(shape=[2**32, 2**32], end=0)}),
        ["[4294967296, 4294967296]", "2**63"],
    ),
    "product overflows to zero": (
        pack({"a": entry("U8", [2**62, 2**62, 0], end=0)}),
        ["2**63 bytes"],
    ),
    "offsets missing": (pack({"a": entry() | {"data_offsets": []}}, bytes(8)), ["[begin, end]"]),
    "three offsets": (pack({"a": entry() | {"data_offsets": [0, 4, 8]}}, bytes(8)), ["[0, 4, 8]"]),
    "offsets of strings": (pack({"a": entry(begin="0")}, bytes(8)), ["['0', 8]"]),
    "offsets of floats": (pack({"a": entry(end=8.0)}, bytes(8)), ["[0, 8.0]"]),
    "offsets of bools": (pack({"a": entry("U8", [1], False, True)}, b"1"), ["[False, True]"]),
    "offsets are null": (pack({"a": entry() | {"data_offsets": None}}), ["data_offsets None"]),
    "offsets reversed": (pack({"a": entry(begin=8, end=0)}, bytes(8)), ["[8, 0]"]),
    "offset negative": (pack({"a": entry(begin=-8, end=0)}, bytes(8)), ["[-8, 0]"]),
    "offset past all numbers": (pack({"a": entry(end=2**64)}, bytes(8)), ["18446744073709551616"]),
    "fewer bytes than the shape": (
        pack({"a": entry(shape=[3])}, bytes(8)),
        ["'a'", "8 bytes", "[3]", "12 bytes"],
    ),
    "overlap": (
        pack({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)),
        ["'b' overlaps"],
    ),
    "the same bytes twice": (pack({"a": entry(), "b": entry()}, bytes(8)), ["'b' overlaps"]),
    "an empty tensor within another": (
        pack({"a": entry(), "b": entry(shape=[0], begin=4, end=4)}, bytes(8)),
        ["'b' overlaps"],
    ),
    "a hole": (pack({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)), ["'b'", "hole"]),
    "a hole at the start": (pack({"a": entry(begin=4, end=12)}, bytes(12)), ["'a'", "hole"]),
    "incomplete download": (
        HALF,
        ["incomplete", f"expected {len(HALF) + 4} bytes", f"has {len(HALF)}", "again"],
    ),
    "trailing bytes": (pack({"a": entry()}, bytes(11)), ["3 bytes after the last tensor"]),
    "trailing bytes without tensors": (pack({}, bytes(3)), ["3 bytes after"]),
}


@pytest.mark.parametrize(("content", "said"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_with_its_name_and_its_numbers(content, said, tmp_path):
    file = write_single(tmp_path, content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert len(message) < 1000
    for text in said:
        assert text in message


def test_a_header_above_the_limit_of_the_format_is_not_read(tmp_path):
    file = write_single(tmp_path, (100_000_001).to_bytes(8, "little"))
    with open(file, "r+b") as stream:
        stream.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="100000001 bytes.*allows 100000000"):
        Checkpoint(tmp_path)


def test_a_file_without_tensors_is_a_checkpoint_without_names(tmp_path):
    write_single(tmp_path, pack({"__metadata__": {"format": "pt"}}))
    assert Checkpoint(tmp_path).names() == []


@pytest.mark.parametrize(
    "shard",
    [
        "../m-1.safetensors",
        "/m-1.safetensors",
        "sub/m-1.safetensors",
        "sub\\m-1.safetensors",
        "C:m-1.safetensors",
        "m-1.safetensors\0",
        "..",
        "",
        "m-1.bin",
        "m" * 5000 + ".safetensors",
        7,
        None,
        ["m-1.safetensors"],
    ],
)
def test_an_index_that_leaves_its_folder_is_refused(shard, sharded):
    folder, _, shards = sharded
    index = write_index(folder, shards | {"b": shard})
    with pytest.raises(CheckpointError, match="tensor 'b'.*not a plain name") as caught:
        Checkpoint(folder)
    assert str(caught.value).startswith(f"{index}: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("[]", "object"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": ["m-1.safetensors"]}', "weight_map"),
        ('{"weight_map": {"a": "m-1.safetensors", "a": "m-2.safetensors"}}', "'a' occurs twice"),
        ('{"weight_map":' * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_index_is_refused(text, said, sharded):
    folder, _, _ = sharded
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=said) as caught:
        Checkpoint(folder)
    assert str(folder / INDEX_NAME) in str(caught.value)


@pytest.mark.parametrize("left", ["nothing", "a broken link", "a folder"])
def test_a_missing_shard_is_named_with_the_number_of_its_tensors(left, sharded):
    folder, _, _ = sharded
    shard = folder / "m-1.safetensors"
    shard.unlink()
    if left == "a broken link":
        shard.symlink_to(folder / "blob")
    if left == "a folder":
        shard.mkdir()
    with pytest.raises(FileNotFoundError, match=r"m-1\.safetensors is missing.*2 of 3 tensors"):
        Checkpoint(folder)


def test_a_tensor_that_the_index_promises_must_be_in_its_shard(sharded):
    folder, _, shards = sharded
    write_index(folder, shards | {"q": "m-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"m-2\.safetensors: tensor 'q' is not in it"):
        Checkpoint(folder)
    write_index(folder, shards | {"b": "m-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"m-2.safetensors: tensor 'b'.*in m-1\.safetensors"):
        Checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(sharded):
    folder, tensors, _ = sharded
    save_file({"c": tensors["c"], "a": tensors["a"]}, folder / "m-2.safetensors")
    with pytest.raises(CheckpointError, match=r"m-2.safetensors: tensor 'a' is also in m-1"):
        Checkpoint(folder)


def test_a_bad_shard_is_named(sharded):
    folder, _, _ = sharded
    shard = folder / "m-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"m-2\.safetensors: the download is incomplete"):
        Checkpoint(folder)


def test_unindexed_tensors_are_ignored_and_listed(sharded):
    folder, _, shards = sharded
    write_index(folder, {name: shard for name, shard in shards.items() if name != "b"})
    checkpoint = Checkpoint(folder)
    assert sorted(checkpoint.names()) == ["a", "c"]
    assert checkpoint.unindexed == ["b"]
    assert "b" not in checkpoint


def test_several_files_without_an_index_are_refused_with_their_names(sharded):
    folder, _, _ = sharded
    (folder / INDEX_NAME).unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json is missing.*m-1\.safetensors"):
        Checkpoint(folder)


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*only safetensors.*Convert"):
        Checkpoint(tmp_path)


def test_empty_or_missing_folder_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        Checkpoint(tmp_path / "nowhere")


# Fuzzing. The oracle is the safetensors library: this reader may refuse what that one accepts,
# and must never accept what that one refuses, or read other bytes.


def check_any_file(folder, content):
    """Raises CheckpointError, or has tensors that lie inside the file and don't overlap."""
    file = folder / SINGLE_NAME
    file.unlink(missing_ok=True)  # the last example's file may still be mapped
    file.write_bytes(content)
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError as error:
        assert str(file) in str(error)
        return False
    start = 8 + int.from_bytes(content[:8], "little")
    end = start
    with checkpoint, safe_open(file, framework="pt") as peer:
        assert set(peer.keys()) == set(checkpoint.names())
        for name in checkpoint.names():
            info = checkpoint.info(name)
            assert info.offset == end
            end += info.nbytes
            tensor = checkpoint.tensor(name)
            assert as_bytes(tensor) == content[info.offset : end]
            assert_same_bits(tensor, peer.get_tensor(name))
    assert end == len(content)
    return True


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def valid_file(seed):
    """A small file with tensors of all kinds of sizes, in a shuffled header."""
    rng = random.Random(seed)
    entries, data = {}, b""
    for i in range(rng.randint(0, 4)):
        dtype = rng.choice(list(DTYPES))
        shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
        nbytes = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        entries[f"t{i}"] = entry(dtype, shape, len(data), len(data) + nbytes)
        data += bytes(rng.randrange(2) for _ in range(nbytes))
    names = rng.sample(list(entries), len(entries))
    return {name: entries[name] for name in names}, data


@fuzzed
@given(st.integers(0, 2**32))
def test_fuzz_valid_files_are_all_read(fuzz_folder, seed):
    assert check_any_file(fuzz_folder, pack(*valid_file(seed)))


edits = st.tuples(
    st.sampled_from(["set", "insert", "delete", "copy", "cut"]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(b'{}[]:,"\\0123456789-.eFBU \x00\xff'),
)


@fuzzed
@given(st.integers(0, 2**32), st.lists(edits, min_size=1, max_size=4))
def test_fuzz_changed_bytes_never_crash_the_reader(fuzz_folder, seed, changes):
    content = bytearray(pack(*valid_file(seed)))
    for kind, place, byte in changes:
        at = int(place * len(content))
        if kind == "set":
            content[at : at + 1] = bytes([byte])
        elif kind == "insert":
            content[at:at] = bytes([byte])
        elif kind == "delete":
            del content[at : at + 1]
        elif kind == "copy":
            content[at:at] = content[at : at + byte]
        else:
            del content[len(content) - min(byte % 9, len(content)) :]
    check_any_file(fuzz_folder, bytes(content))


slips = st.tuples(
    st.sampled_from(["dtype", "shape", "data_offsets"]),
    st.sampled_from(["add", "add", "append", "drop"]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([-8, -1, 0, 1, 2, 8, 2**40]),
)


@fuzzed
@given(st.integers(0, 2**32), st.lists(slips, min_size=1, max_size=2))
def test_fuzz_one_change_in_a_valid_header_is_read_right_or_refused(fuzz_folder, seed, changes):
    entries, data = valid_file(seed)
    for key, kind, which, place, number in changes:
        for described in list(entries.values())[which : which + 1]:
            values = described[key]
            if key == "dtype":
                described[key] = list(DTYPES)[number % len(DTYPES)]
            elif kind == "append":
                values.append(number)
            elif values and kind == "drop":
                values.pop()
            elif values:
                values[place % len(values)] += number
    check_any_file(fuzz_folder, pack(entries, data))


# Offsets and shapes that stay near to what fits, so that many almost do.
numbers = st.one_of(
    st.integers(0, 12),
    st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 1.5, True, None, "4", float("nan")]),
)
mostly_small = st.one_of(st.integers(0, 12), st.integers(0, 12), numbers)
random_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "U8", "BOOL", "BF16", "F32", "F64", "F4", "X", 3]),
        "shape": st.one_of(st.lists(mostly_small, max_size=3), numbers),
        "data_offsets": st.one_of(st.lists(mostly_small, min_size=2, max_size=2), numbers),
    }
)


@fuzzed
@given(
    st.dictionaries(st.sampled_from("abcd"), random_entry, max_size=4),
    st.integers(0, 24),
)
def test_fuzz_random_headers_are_read_right_or_refused(fuzz_folder, entries, length):
    check_any_file(fuzz_folder, pack(entries, bytes(length)))


spans = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=4)


@fuzzed
@given(spans, st.integers(0, 12))
def test_fuzz_layouts_with_holes_and_overlaps_are_refused(fuzz_folder, places, length):
    """Headers that are valid except for their tensors' offsets."""
    entries = {f"t{i}": entry("U8", [n], at, at + n) for i, (at, n) in enumerate(places)}
    covered = sorted(byte for at, n in places for byte in range(at, at + n))
    accepted = check_any_file(fuzz_folder, pack(entries, bytes(length)))
    assert not accepted or covered == list(range(length))


@fuzzed
@given(st.binary(max_size=64))
def test_fuzz_random_bytes_are_refused(fuzz_folder, content):
    check_any_file(fuzz_folder, content)
    check_any_file(fuzz_folder, pack(content))
