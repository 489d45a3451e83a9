"""GGUF files: packed blocks, hostile files, split files, folders. Architectures are in
test_llama_cpp_converter.py."""

from __future__ import annotations

import json
import os
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_cpu import on_cpu
from packers.gguf import gguf, in_types, write_gguf
from runs import Readable, bound_runs
from safetensors.torch import load_file, save_file
from simproc import run_sim
from tiny import (
    LATENT,
    LATENT_YARN,
    TINY,
    llama,
    reference,
    save,
)

from exkv import Cache, Model, ModelConfig, Tokenizer
from exkv.checkpoint import CheckpointError, find_gguf, open_checkpoint
from exkv.cli import main
from exkv.loading.report import LINES

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
#: What GGUF can't say: one number stands for both of YaRN's, which are the same in DeepSeek's
#: models; and so on.
ONE_TEMPERATURE = {"rope_parameters": {**LATENT_YARN["rope_parameters"], "mscale": 1.0}}
CONFIGS = {
    **{name: TINY[name] for name in ("Glm4MoeForCausalLM", "LlamaForCausalLM")},
    "GptOssForCausalLM": partial(TINY["GptOssForCausalLM"], swiglu_limit=7.0),
    "MixtralForCausalLM": TINY["MixtralForCausalLM"],
}


def logits_of(model: Model) -> torch.Tensor:
    cache = Cache(model, 64, 2)
    return torch.cat([model.forward(IDS[:, :39], cache), model.forward(IDS[:, 39:], cache)], 1)


def saved(name: str, folder: Path):
    """transformers' model, its config with the architecture, and its tensors as it saves them."""
    theirs = reference(CONFIGS[name]())
    save(theirs, folder)
    theirs.config.architectures = [type(theirs).__name__]
    return theirs, load_file(folder / "model.safetensors")


#: Sizes that are whole blocks of 32.
BLOCKS = {**dict.fromkeys(LATENT, 32), "num_key_value_heads": 4}


@pytest.mark.parametrize("of_heads", [True, False], ids=["of heads", "in one matrix"])
@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_packed_latent_attention_matches_its_floats(tmp_path, monkeypatch, name, of_heads):
    """In one matrix, as in files until April 2025, which also lacked some metadata."""
    changes = {"q_lora_rank": None} if name == "DeepseekV2ForCausalLM" else {}
    theirs = reference(TINY[name](**ONE_TEMPERATURE, **{**BLOCKS, **changes}))
    tensors = load_file(save(theirs, tmp_path / "saved") / "model.safetensors")
    theirs.config.architectures = [name]
    if not of_heads:
        monkeypatch.setattr("packers.gguf.SPLITS", False)
    types = in_types("Q8_0", "Q4_0", "F16")
    write_gguf(tmp_path / "packed.gguf", theirs.config, tensors, types)
    types = in_types("Q8_0", "Q4_0", "F16")
    write_gguf(tmp_path / "floats.gguf", theirs.config, tensors, types, as_floats=True)
    model = quantized_model(tmp_path / "packed.gguf")
    part = "k_b_proj" if of_heads else "kv_b_proj"
    assert any(part in layer for layer in model.config.quantization["types"])
    assert model.config.latent == ModelConfig.from_pretrained(tmp_path / "saved").latent
    found, expected = logits_of(model), logits_of(on_cpu(tmp_path / "floats.gguf"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_experts_in_mxfp4_match_their_dequantized_floats(tmp_path):
    """As gpt-oss's files have them."""
    theirs, tensors = saved("GptOssForCausalLM", tmp_path / "saved")
    packed = gguf.GGMLQuantizationType.MXFP4
    of = lambda name, values: packed if "_exps.weight" in name else None  # noqa: E731
    write_gguf(tmp_path / "packed.gguf", theirs.config, tensors, of)
    write_gguf(tmp_path / "floats.gguf", theirs.config, tensors, of, as_floats=True)
    model = quantized_model(tmp_path / "packed.gguf")
    assert set(model.config.quantization["types"].values()) == {"MXFP4"}
    found, expected = logits_of(model), logits_of(on_cpu(tmp_path / "floats.gguf"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_unstated_window_is_a_warning(tmp_path, caplog):
    theirs, tensors = saved("LlamaForCausalLM", tmp_path / "saved")
    for name, warned in (("Mistral-7B-Instruct-v0.1", True), ("Mistral-7B-v0.3", False)):
        caplog.clear()
        file = tmp_path / f"{name}.gguf"
        write_gguf(
            file, theirs.config, tensors, tokenizer=lambda writer, n=name: writer.add_name(n)
        )
        ModelConfig.from_pretrained(file)
        assert ("its layers see 4096 tokens" in caplog.text) == warned


def test_mtp_layers_are_ignored(tmp_path, caplog):
    """They follow the other layers, and count as blocks."""
    theirs, tensors = saved("Glm4MoeForCausalLM", tmp_path / "saved")
    file = tmp_path / "model.gguf"

    def beyond(writer) -> None:
        writer.add_tensor("blk.2.attn_norm.weight", torch.ones(64).numpy())
        writer.add_tensor("blk.2.nextn.eh_proj.weight", torch.ones(64, 128).numpy())

    write_gguf(file, theirs.config, tensors, tokenizer=beyond)
    assert on_cpu(file).config.num_hidden_layers == 2
    assert "blk.2.attn_norm.weight, blk.2.nextn.eh_proj.weight" in caplog.text


TYPES = ("Q4_K", "Q6_K", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
POINTS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
RARE = ("TQ1_0", "TQ2_0", "NVFP4")
OLDER = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")
MIXTURES = {"MixtralForCausalLM": OLDER, "wide": TYPES, "points": POINTS, "rare": RARE}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> dict[str, Path]:
    """A mixture of the older types with experts, Llamas of the K types, of points of codebooks, and
    of those without kernels; each beside a folder of the floats that it stands for."""
    top = tmp_path_factory.mktemp("quantized")
    for name in MIXTURES.keys() - {"MixtralForCausalLM"}:
        CONFIGS[name] = lambda: llama(hidden_size=256, intermediate_size=256, num_hidden_layers=3)
    for name, types in MIXTURES.items():
        theirs, tensors = saved(name, top / f"{name}-floats")
        plain = write_gguf(top / f"{name}.gguf", theirs.config, tensors, in_types(*types))
        plain = {key: value.contiguous() for key, value in plain.items()}
        save_file(plain, top / f"{name}-floats" / "model.safetensors", {"format": "pt"})
    return {name: top / f"{name}.gguf" for name in MIXTURES}


@pytest.mark.parametrize("name", MIXTURES)
def test_packed_blocks_match_their_dequantized_floats(quantized, name):
    file = quantized[name]
    found = logits_of(quantized_model(file))
    expected = logits_of(on_cpu(file.parent / f"{name}-floats"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def quantized_model(file: Path) -> Model:
    return on_cpu(file, dtype=torch.float32)


def test_a_tensor_for_each_expert_is_the_same_model(tmp_path):
    theirs, tensors = saved("MixtralForCausalLM", tmp_path / "floats")
    file, types = tmp_path / "apart.gguf", in_types("Q4_0", "Q8_0", "BF16")
    plain = write_gguf(file, theirs.config, tensors, types, experts_apart=True)
    plain = {key: value.contiguous() for key, value in plain.items()}
    save_file(plain, tmp_path / "floats" / "model.safetensors", {"format": "pt"})
    found, expected = logits_of(quantized_model(file)), logits_of(on_cpu(tmp_path / "floats"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()

    def twice(writer) -> None:
        writer.add_tensor("blk.0.ffn_up_exps.weight", torch.zeros(2, 64, 64).numpy())

    write_gguf(file, theirs.config, tensors, tokenizer=twice, experts_apart=True)
    with pytest.raises(CheckpointError, match="'blk.0.ffn_up.0.weight' has the weights model"):
        open_checkpoint(file)


@pytest.mark.parametrize("name", ["wide", "points"])
def test_packed_blocks_are_bit_identical_in_bound_runs(quantized, name):
    model = quantized_model(quantized[name])
    ids = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(2))

    def taken() -> list[torch.Tensor]:
        cache = Cache(model, 16, 2)
        return [model.forward(part, cache) for part in ids.split([8, 1, 1, 2], 1)]

    with bound_runs() as runs:
        found = taken()
    with Readable():
        expected = taken()
    assert runs == [len(model.units)] * 4
    assert all(map(torch.equal, found, expected))


def planned_and_measured(files: list[str]) -> list[dict]:
    """Bytes on one device, and on three."""
    return [planned_and_measured_one(file) for file in files]


def planned_and_measured_one(file: str) -> dict:
    model = Model(file, dtype=torch.bfloat16, max_input_len=12)
    cache, seen = Cache(model, 64, 2), {"rows": [], "bits": []}
    for names in (["sim:0"], ["sim:0", "sim:1", "sim:2"]):
        model.load_autosplit(cache, devices=names, objective="balance")
        for row in model.report.devices:
            seen["rows"] += [[getattr(row.ledger, k), row.measured.get(k, 0)] for k in LINES]
        cache.reset()
        seen["bits"].append(model.forward(IDS, cache).cpu())
        weights = sum(row.ledger.weights for row in model.report.devices)
        model.unload()
    stored = sum(t.nbytes for unit in model.units for t in unit.shapes.values())
    left = [torch.accelerator.memory_allocated(index) for index in range(3)]
    return {**seen, "bits": torch.equal(*seen["bits"]), "left": left, "sizes": [weights, stored]}


def test_a_file_is_planned_to_the_byte_and_split_over_devices(quantized):
    files = [str(file) for file in quantized.values()]
    for seen in run_sim(planned_and_measured, "64M,64M,64M", args=[files]):
        assert all(predicted == measured for predicted, measured in seen["rows"])
        assert seen["bits"] and seen["left"] == [0, 0, 0]
        weights, stored = seen["sizes"]
        assert stored <= weights <= stored + 512 * 200


def test_bytes_on_a_device_are_those_of_the_file(quantized):
    """Except for floats, which are cast."""
    model = Model(quantized["wide"], dtype=torch.float32)
    with open_checkpoint(quantized["wide"]) as checkpoint:
        stored = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
    assert sum(t.nbytes for unit in model.units for t in unit.shapes.values()) == stored


def test_a_plan_reads_the_header_alone(small, tmp_path, capsys):
    """The same with a hole where the weights would be."""
    found = []
    for part, data in (("whole", small.data), ("hollow", small.data[: small.begin])):
        (tmp_path / part).mkdir()
        file = tmp_path / part / "m.gguf"
        file.write_bytes(data)
        os.truncate(file, len(small.data))
        arguments = [
            "--devices",
            "2M,1M",
            "--max-seq-len",
            "64",
            "--margin",
            "0",
            "--allocator",
            "exact",
            "--json",
        ]
        assert main(["plan", str(file), *arguments]) == 0
        found.append(json.loads(capsys.readouterr().out.replace(str(file), "the file")))
        del found[-1]["seconds"]
    assert found[0] == found[1]
    weights = sum(ledger["weights"] for ledger in found[0]["plans"]["model"]["ledgers"])
    stored = sum(tensor.nbytes for tensor in small.tensors.values())
    assert stored <= weights <= stored + 512 * len(small.tensors)


def test_unknown_tensor_is_refused(tmp_path):
    """Without it, the model's logits would differ."""
    theirs, tensors = saved("LlamaForCausalLM", tmp_path / "saved")
    extra = {"model.layers.1.self_attn.v_proj.bias": torch.ones(64)}
    write_gguf(tmp_path / "m.gguf", theirs.config, {**tensors, **extra})
    with pytest.raises(
        CheckpointError, match=r"no place for 1 of its tensors: .*1.self_attn.v_proj.b"
    ):
        Model(tmp_path / "m.gguf").load(devices=["cpu"])


# Hostile files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> SimpleNamespace:
    """A tiny file, where its data begins, and its tensors."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    CONFIGS["small"] = lambda: llama(**sizes, num_attention_heads=4, vocab_size=64)
    theirs, tensors = saved("small", folder / "saved")
    file = folder / "small.gguf"
    write_gguf(file, theirs.config, tensors, in_types("Q8_0"), _write_words)
    data = file.read_bytes()
    begin = len(data) - sum(int(t.n_bytes) for t in gguf.GGUFReader(file).tensors)
    with open_checkpoint(file) as checkpoint:
        made = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    return SimpleNamespace(data=data, begin=begin, tensors=made, folder=folder)


def test_quantized_file_is_not_quantized_again(small, tmp_path, capsys):
    file = small.folder / "small.gguf"
    assert main(["quantize", str(file), str(tmp_path / "out"), "--weights", "int4"]) == 2
    assert f"{file} is not a folder of safetensors" in capsys.readouterr().err


def _write_words(writer) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
    writer.add_token_types([2, 3, 3, 1])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0])
    writer.add_array("numbers", [[1, 2], [3]])


def outcome(path: Path, small: SimpleNamespace) -> None:
    """The file is refused by its name, or loads as the stored tensors."""
    for use in (use_weights, use_words):
        try:
            use(path, small)
        except ValueError as error:  # CheckpointError is one
            assert path.name in str(error)
            assert len(str(error)) < 1500 + 3 * len(str(path))


def use_words(path: Path, small: SimpleNamespace) -> None:
    tokenizer = Tokenizer(path)
    assert isinstance(tokenizer.decode(tokenizer.encode("a", add_bos=False)), str)


def use_weights(path: Path, small: SimpleNamespace) -> None:
    config = ModelConfig.from_pretrained(path)
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.names():
            made = checkpoint.tensor(name)
            assert made.nbytes == checkpoint.info(name).nbytes
        if set(checkpoint.names()) == set(small.tensors):
            checkpoint.expect(Model(config).stored_tensors())


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_header_is_refused_by_name_or_read_right(small, tmp_path, data):
    header = bytearray(small.data[: small.begin])
    wide = st.integers(0, len(header) - 8)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(wide)
        change = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=4),
                st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]).map(
                    lambda n: struct.pack("<Q", n)
                ),
            )
        )
        header[place : place + len(change)] = change
    whole = bytes(header) + small.data[small.begin :]
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    file = tmp_path / "mutated.gguf"
    file.write_bytes(whole[:cut])
    outcome(file, small)


def header(*pairs: bytes, tensors: bytes = b"", count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, count, len(pairs)) + b"".join(pairs) + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + data


ARCH = pair("general.architecture", 8, text("llama"))
DEEP = array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(0, 0, b""))))))
BAD = {
    "begins with b'GGML'": b"GGML" + header()[4:],
    "Git LFS pointer": b"version https://git-lfs",
    "version 1 of GGUF": header(version=1),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "18446744073709551615 tensors": header(count=2**64 - 1),
    "the key 'general.architecture' occurs twice": header(ARCH, ARCH),
    "'x' is of the type 77": header(pair("x", 77, b"")),
    "'x' has elements of the type 77": header(pair("x", 9, array(77, 1, b""))),
    "entries of 'x' of at least": header(pair("x", 9, array(8, 2**60, b""))),
    "numbers of 'x' of at least": header(pair("x", 9, array(12, 2**61, b""))),
    "arrays 5 deep": header(pair("x", 9, DEEP)),
    "is not UTF-8": header(pair("x", 8, struct.pack("<Q", 2) + b"\xff\xfe")),
    "the text of 'x' has 4611686018427387904 bytes": header(pair("x", 8, struct.pack("<Q", 2**62))),
    "90000 bytes of a text of at least": header(pair("x", 8, struct.pack("<Q", 90000))),
    "neither 0 nor 1": header(pair("x", 7, b"\x02")),
    "general.alignment is 3": header(pair("general.alignment", 4, struct.pack("<I", 3))),
    "has 9 dimensions": header(tensors=tensor("a", [1] * 9), count=1),
    "is of the type Q2_0; exkv": header(tensors=tensor("a", [256], 42), count=1),
    "is of the type Q4_0_4_4; exkv reads": header(tensors=tensor("a", [256], 31), count=1),
    "is of the type 99; exkv reads": header(tensors=tensor("a", [256], 99), count=1),
    r"has the sizes \[33\]": header(tensors=tensor("a", [33], 8), count=1),
    r"has the sizes \[0\]": header(tensors=tensor("a", [0]), count=1),
    "and the file has": header(tensors=tensor("a", [2**62, 2**62]), count=1),
    "overlaps with": header(tensors=tensor("a", [8]) + tensor("b", [8]), count=2) + bytes(256),
    "follows a hole": header(tensors=tensor("a", [8], 0, 64), count=1) + bytes(256),
    "occurs twice": header(tensors=tensor("a", [8]) + tensor("a", [8], 0, 32), count=2)
    + bytes(200),
    "belong to none": header(tensors=tensor("a", [8]), count=1) + bytes(512),
    "general.architecture is None": header(),
    "architecture 'bert' is not": header(pair("general.architecture", 8, text("bert"))),
    "the metadata lacks llama.context_length": header(ARCH),
}


@pytest.mark.parametrize("message", BAD)
def test_what_the_format_forbids_is_refused(tmp_path, message):
    file = tmp_path / "bad.gguf"
    file.write_bytes(BAD[message])
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_pretrained(file)
    assert str(file) in str(caught.value)


# Folders and parts ------------------------------------------------------------------------------


def test_a_folder_with_several_models_lists_them(small, tmp_path):
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(small.data)
    with pytest.raises(CheckpointError, match=r"2 GGUF models: a.gguf, b.gguf. Name one"):
        Model(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert Model(tmp_path).config.path == tmp_path / "a.gguf"


def split(small: SimpleNamespace, folder: Path, numbers=(0, 1), count=2) -> Path:
    """The file in parts as llama.cpp splits it: the first has the metadata."""
    reader = gguf.GGUFReader(small.folder / "small.gguf")
    parts = [reader.tensors[:4], reader.tensors[4:]]
    for index, number in enumerate(numbers):
        writer = gguf.GGUFWriter(folder / f"m-{index + 1:05}-of-00002.gguf", "llama")
        if index == 0:
            for key, field in reader.fields.items():
                if key.startswith("llama."):
                    writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for each in parts[index]:
            writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder / "m-00001-of-00002.gguf"


def test_any_part_names_the_whole_model(small, tmp_path):
    first = split(small, tmp_path)
    assert find_gguf(tmp_path) == find_gguf(tmp_path / "m-00002-of-00002.gguf") == first
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(small.tensors)
        assert all(torch.equal(checkpoint.tensor(n), t) for n, t in small.tensors.items())
    Model(tmp_path).load(devices=["cpu"])


def test_missing_or_mixed_parts_are_refused(small, tmp_path):
    split(small, tmp_path, numbers=(0, 0))
    with pytest.raises(CheckpointError, match=r"split.no and split.count are \(0, 2\)"):
        Model(tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="00002-of-00002.gguf is missing of 2 parts"):
        Model(tmp_path)


def test_pieces_of_reordered_rows_equal_the_whole(small):
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_checkpoint(small.folder / "small.gguf") as checkpoint:
        whole = checkpoint.tensor(name).view(-1)
        for first, count in ((0, 1), (33, 70), (100, len(whole) - 100)):
            piece = torch.empty(count, dtype=torch.uint8)
            checkpoint.read_into(name, piece, first)
            assert torch.equal(piece, whole[first : first + count])
