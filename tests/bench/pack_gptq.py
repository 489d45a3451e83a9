"""Pack the floats of ``bits.py`` by GPTQ as others do it: ``python -m tests.bench.pack_gptq FLOATS
ROWS OUT [BITS] [GROUP]``.

The packer is llm-compressor (vLLM's), which runs on a CPU; ``bits --ways packed --packed
"gptq int4=OUT"`` measures what it wrote. transformers reads the floats out of the GGUF file, so
that nothing of exkv is between them. It wants an environment of its own: ``pip install --no-deps
--target DIR llmcompressor loguru datasets dill multiprocess xxhash pandas pyarrow python-dateutil
pytz aiohttp nvidia-ml-py auto-round``, with DIR in PYTHONPATH.

Args:
    FLOATS: ``floats.gguf`` of a ``bits --out`` folder.
    ROWS: ``calibration.json`` of that folder, the same token ids as our ways are calibrated by.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(floats: str, rows: str, out: str, bits: str = "4", group: str = "64") -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    path, plain = Path(floats), f"{out}-floats"  # a folder, which the packer's checks want
    found: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    del found.config.quantization_config, found.hf_quantizer
    made = AutoModelForCausalLM.from_config(found.config)
    made.load_state_dict(found.state_dict())
    made.save_pretrained(plain)
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    batches = [{"input_ids": torch.tensor([x])} for x in json.loads(Path(rows).read_text())]
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))  # it wants one, unused
    weights = QuantizationArgs(
        num_bits=int(bits), type="int", symmetric=True, strategy="group", group_size=int(group)
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    oneshot(
        model=model,
        dataset=DataLoader(batches, batch_size=None),
        recipe=recipe,
        processor=words,
        num_calibration_samples=len(batches),
    )
    model.save_pretrained(out, save_compressed=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
