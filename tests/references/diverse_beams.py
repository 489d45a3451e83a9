"""Writes diverse_beams.json: what transformers 4.48.3 generates with groups of beams.

Later versions no longer have group beam search in their own code, so this runs in two steps. The
first makes the tiny models with the tests' own transformers, the second reads them with 4.48.3:

    python tests/references/diverse_beams.py models DIR
    pip install --target OLD transformers==4.48.3 "tokenizers<0.22" "huggingface-hub<1" requests
    PYTHONPATH=OLD python tests/references/diverse_beams.py tokens DIR

``weights`` in the file is a checksum: tests/test_generate.py compares it before the tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_suffix(".json")
VERSION = "4.48.3"
SEEDS = (0, 1, 2)
#: For the models: few tokens, so that ends of sequences come up often.
CHANGES = {"vocab_size": 32, "eos_token_id": [2, 9], "pad_token_id": 3, "num_hidden_layers": 2}
ROWS = ([1, 4, 5, 6, 7, 11, 12], [1, 20, 8], [1, 30, 17, 8, 9])
CALLS = (
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 1.0, "length_penalty": 2.0},
    {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.3, "early_stopping": True},
    {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 5.0, "length_penalty": 0.0},
    {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 0.7, "repetition_penalty": 1.3},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.2, "no_repeat_ngram_size": 2},
    {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0, "pad_token_id": 2},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "max_new_tokens": 1},
)


def checksum(model: torch.nn.Module) -> str:
    """SHA-256 of the weights in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def call_of(options: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of ``generate`` but the prompts, here as in the test."""
    everything = {"num_return_sequences": options["num_beams"], "max_new_tokens": 14}
    return {**everything, "return_dict_in_generate": True, "do_sample": False, **options}


def rows_of(options: dict[str, Any]) -> tuple[list[int], ...]:
    """The prompts of a call. 4.48 penalizes padding, so there is none where that would show."""
    return ROWS[:1] if "repetition_penalty" in options else ROWS


def padded(rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """Rows as transformers takes them."""
    pad, width = CHANGES["pad_token_id"], max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def save_models(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tiny import llama, reference, save

    for seed in SEEDS:
        save(reference(llama(**CHANGES), seed=seed), folder / str(seed))


def write_tokens(folder: Path) -> None:
    import transformers

    if transformers.__version__ != VERSION:
        sys.exit(f"this is transformers {transformers.__version__}, and {VERSION} is needed")
    cases = []
    for seed in SEEDS:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / str(seed)).eval()
        for options in CALLS:
            call = {**padded(rows_of(options)), **call_of(options), "output_scores": True}
            answer = model.generate(**call)
            cases.append(
                {
                    "seed": seed,
                    "weights": checksum(model),
                    "options": options,
                    "sequences": answer.sequences.tolist(),
                    "scores": [round(score, 6) for score in answer.sequences_scores.tolist()],
                }
            )
    lines = ",\n".join(json.dumps(case) for case in cases)
    FILE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("models", "tokens"):
        sys.exit(__doc__)
    {"models": save_models, "tokens": write_tokens}[sys.argv[1]](Path(sys.argv[2]))
