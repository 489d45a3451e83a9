"""Train the demo adapter, which answers as briefly as possible, with PEFT in a minute.

``python examples/train_adapter.py OUT`` (needs transformers and peft) wrote
``examples/demo-adapter``; ``examples/adapters.py`` uses it.
"""

import random
import sys

import torch
import toy_world
from peft import LoraConfig, get_peft_model
from train_demo import render
from transformers import AutoModelForCausalLM

from exkv import Tokenizer

DEMO = "examples/demo-model"
STEPS, ROWS = 240, 16


def short_chat(rng: random.Random) -> tuple[toy_world.Messages, str]:
    """State where a few things are, and ask for one; the answer is like ``In the kitchen.``"""
    things = rng.sample(toy_world.OBJECTS, rng.randint(1, 3))
    places = rng.sample(toy_world.ROOMS, len(things))
    told = [
        rng.choice((f"The {thing} is", f"{rng.choice(toy_world.NAMES)} put the {thing}"))
        + f" in the {place}."
        for thing, place in zip(things, places, strict=True)
    ]
    asked = rng.randrange(len(things))
    text = " ".join([*told, f"Where is the {things[asked]}?"])
    return [{"role": "user", "content": text}], f"In the {places[asked]}."


def batch_of(
    examples: list[tuple[toy_world.Messages, str]], tokenizer: Tokenizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T), and the same with -100 for all but the answers."""
    rows, labels = [], []
    for messages, answer in examples:
        prompt = tokenizer.encode(render(messages, True).removeprefix("<s>"), add_special=True)
        answered = [*messages, {"role": "assistant", "content": answer}]
        whole = tokenizer.encode(render(answered).removeprefix("<s>"), add_special=True)
        rows.append(torch.tensor(whole))
        labels.append(torch.tensor([-100] * len(prompt) + whole[len(prompt) :]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True), pad(labels, True, -100)


def main(out: str) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3)
    rng = random.Random(0)
    for step in range(STEPS):
        ids, labels = batch_of([short_chat(rng) for _ in range(ROWS)], tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    for weight in weights:
        weight.data = weight.data.bfloat16()
    model.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: train_adapter.py OUT")
    main(sys.argv[1])
