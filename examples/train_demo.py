"""Train this folder's demo model from scratch, on two CPU cores, in twenty-odd minutes.

    python examples/train_demo.py                  # writes examples/demo-model
    python examples/train_demo.py --evaluate examples/demo-model

The text comes from toy_world.py. The model is a small Llama in Hugging Face's layout, trained with
transformers (exkv itself never imports it). So small a model would take hours to discover that
facts can be looked up; `guidance` tells one head in each of two layers where to look, with a weight
that falls during training. Chats grow longer as the model masters them. Next: chat.py.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import string
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import toy_world
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
END = SPECIAL.index("<|end|>")
ASSISTANT = SPECIAL.index("<|assistant|>")
BUCKETS = (0, 100, 250, 500, 750, 1000)
# User text starts with a space, so that a word is the same token everywhere.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] != 'assistant' %}{{ ' ' }}{% endif %}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_TEMPLATE = jinja2.Environment().from_string(CHAT_TEMPLATE)
# Weight of a token in the loss: answers can be predicted, what users say hardly.
USER_WEIGHT, ANSWER_WEIGHT = 0.1, 1.0
# Lengths of the chats; the next one follows when this share of looked-up words is right, at the
# latest after these shares of the time.
LENGTHS, MASTERED, LATEST = (80, 160, 320, 640, 1330), 0.93, (0.35, 0.5, 0.65, 0.8)
# Layers whose first head is guided, and the guidance's initial weight in the loss.
BINDING_LAYER, LOOKUP_LAYER, GUIDANCE = 1, 2, 0.3
# Largest distance in tokens between a value and its subject, in any wording.
REACH = 9


def render(messages: toy_world.Messages, generation_prompt: bool = False) -> str:
    """The chat as the model reads it."""
    return _TEMPLATE.render(
        bos_token="<s>", messages=messages, add_generation_prompt=generation_prompt
    )


# The tokenizer


def train_tokenizer(folder: Path, seed: int, vocab_size: int) -> None:
    """Write tokenizer.model: a piece per word of the toy world, bytes for all other text."""
    rng = random.Random(f"tokenizer/{seed}")
    words = set(toy_world.vocabulary()) | {" " + word for word in toy_world.vocabulary()}
    for _ in range(1000):
        for message in toy_world.document(rng, 400).messages:
            lead = "" if message["role"] == "assistant" else " "
            words.update(re.findall(r" ?\w+", lead + message["content"]))
    # Each word counts the same, so that rare ones become one piece, too.
    lines = sorted(words) * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        required_chars=string.ascii_letters + string.digits + ".,?!'-:;()",
        user_defined_symbols=SPECIAL[1:],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()


# Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Chats of about one length, and where their answers can be found.

    Attributes:
        ids: int64 (B, T), padded on the right with </s>.
        weights: float32 (B, T), each token's weight in the loss.
        bindings: int64 (3, N), ``(row, token, subject)``: a value, or the position that predicts
            one, and its subject.
        lookups: int64 (3, M), ``(row, token, value)``: the position that predicts a value, and
            where that value was told.
    """

    ids: Tensor
    weights: Tensor
    bindings: Tensor
    lookups: Tensor


def pad(rows: list[list[int]], width: int = 0) -> Tensor:
    """Rows of token ids, padded on the right to (B, T), T at least `width`."""
    width = max(width, *(len(row) for row in rows))
    return torch.tensor([row + [2] * (width - len(row)) for row in rows])


def make_batch(
    sp: sentencepiece.SentencePieceProcessor, rng: random.Random, tokens: int, rows: int
) -> Batch:
    """`rows` training chats of about `tokens` tokens each."""
    texts, bindings, lookups = [], [], []
    for row in range(rows):
        document = toy_world.document(rng, tokens)
        ids, spans = encode_messages(sp, document)
        texts.append(ids)
        for question in document.questions:
            if question.fact is not None:
                bound, found = where_to_look(sp, ids, spans, question)
                bindings += [(row, *pair) for pair in bound]
                lookups += [(row, *pair) for pair in found]
    ids = pad(texts, tokens + 1)  # one width per length, since new shapes are slow
    return Batch(
        ids=ids,
        weights=token_weights(ids),
        bindings=torch.tensor(bindings, dtype=torch.int64).view(-1, 3).T,
        lookups=torch.tensor(lookups, dtype=torch.int64).view(-1, 3).T,
    )


def encode_messages(
    sp: sentencepiece.SentencePieceProcessor, document: toy_world.Document
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a chat: its ids, and each message's start and end."""
    ids, spans = [SPECIAL.index("<s>")], []
    for message in document.messages:
        piece = sp.encode(render([message]).removeprefix("<s>"))
        spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return ids, spans


def token_weights(ids: Tensor) -> Tensor:
    """ANSWER_WEIGHT for the assistant's tokens, USER_WEIGHT for others, 0 for padding."""
    weights = np.full(ids.shape, USER_WEIGHT, dtype=np.float32)
    for row, tokens in enumerate(ids.tolist()):
        answering = False
        for column, token in enumerate(tokens):
            if answering:
                weights[row, column] = ANSWER_WEIGHT
            answering = token == ASSISTANT or (answering and token != END)
    weights[ids.numpy() == 2] = 0
    return torch.from_numpy(weights)


def where_to_look(
    sp: sentencepiece.SentencePieceProcessor,
    ids: list[int],
    spans: list[tuple[int, int]],
    question: toy_world.Question,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Bindings and lookups of one question, as pairs of token positions; none if its value or
    subject has more than one token."""
    subject, value = (spellings(sp, w) for w in (question.fact.subject, question.fact.value))
    asked, (start, end) = spans[question.message - 1][0], spans[question.message]
    said = next((i for i in range(start, end) if ids[i] in value), None)
    told = last_told(ids[:asked], value, subject)
    if said is None or told is None:
        return [], []
    place, owner = told
    bindings = [(place, owner)] if owner < place else []
    bindings += [(said - 1, i) for i in range(asked, said) if ids[i] in subject][-1:]
    return bindings, [(said - 1, place)]


def spellings(sp: sentencepiece.SentencePieceProcessor, words: str) -> set[int]:
    """The last word's token, with and without the space before it."""
    word = words.split()[-1]
    return {sp.piece_to_id(word), sp.piece_to_id("\u2581" + word)} - {SPECIAL.index("<unk>")}


def last_told(ids: list[int], value: set[int], subject: set[int]) -> tuple[int, int] | None:
    """Last position of the value near its subject, and the subject's position."""
    for place in reversed(range(len(ids))):
        if ids[place] in value:
            around = range(max(0, place - REACH), min(len(ids), place + REACH))
            near = [i for i in around if ids[i] in subject and i != place]
            if near:
                return place, min(near, key=lambda i: abs(i - place))
    return None


# The loss


def losses_of(model: LlamaForCausalLM, batch: Batch, guided: float) -> tuple[Tensor, float]:
    """The loss, and the share of looked-up words that were right."""
    out = model(batch.ids[:, :-1], output_attentions=guided > 0)
    logits = out.logits.float()  # (B, T - 1, V)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    loss = (losses * weights).sum() / weights.sum()
    row, before, _ = batch.lookups
    right = logits[row, before].argmax(-1) == batch.ids[row, before + 1]
    if guided > 0:
        loss = loss + guided * guidance(out.attentions, batch)
    return loss, right.float().mean().item()


def guidance(attentions: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Loss of the guided heads: mean -log of their attention weights at the right positions;
    attentions (B, H, T, T) per layer.

    A value first attends to its subject. Then the position that predicts a value can find it among
    all told values by the subjects that they have attended to.
    """

    def distance(layer: int, pairs: Tensor) -> Tensor:
        row, query, key = pairs
        return -(attentions[layer][row, 0, query, key].float() + 1e-4).log().mean()

    return distance(BINDING_LAYER, batch.bindings) + distance(LOOKUP_LAYER, batch.lookups)


# Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A held-out question: the distance of its fact, and whether greedy decoding was right."""

    distance: int
    kind: str
    right: bool


@torch.no_grad()
def answers_right(
    model: LlamaForCausalLM,
    sp: sentencepiece.SentencePieceProcessor,
    chats: list[tuple[toy_world.Messages, str]],
    rows: int = 8,
) -> list[bool]:
    """Whether greedy decoding gives exactly each answer.

    It does if and only if, with the answer as input, each of its tokens is the likeliest at its
    position: one forward pass instead of one per token.
    """
    prompts = sp.encode([render(messages, generation_prompt=True) for messages, _ in chats])
    answers = [ids + [END] for ids in sp.encode([answer for _, answer in chats])]
    order = sorted(range(len(chats)), key=lambda i: len(prompts[i]))
    right = [False] * len(chats)
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        ids = pad([prompts[i] + answers[i] for i in chosen])
        best = model(ids).logits.argmax(-1)  # (B, T)
        for row, i in enumerate(chosen):
            first = len(prompts[i])
            predicted = best[row, first - 1 : first - 1 + len(answers[i])].tolist()
            right[i] = predicted == answers[i]
    return right


def evaluate(
    folder: Path | str,
    n: int = 1000,
    seed: int = 0,
    model: LlamaForCausalLM | None = None,
) -> list[Verdict]:
    """Ask the model in `folder` (or `model`) `n` held-out questions, in its own dtype."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(Path(folder) / "tokenizer.model"))
    if model is None:
        model = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    items = toy_world.heldout(seed, n)
    right = answers_right(model.eval(), sp, [(i.messages, i.answer) for i in items])
    return [
        Verdict(distance=item.distance_tokens, kind=item.kind, right=ok)
        for item, ok in zip(items, right, strict=True)
    ]


def untold_accuracy(folder: Path | str, n: int = 200, seed: int = 0) -> float:
    """Share of questions about untold facts that are answered with not knowing."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(Path(folder) / "tokenizer.model"))
    model = LlamaForCausalLM.from_pretrained(folder, dtype="auto").eval()
    right = answers_right(model, sp, toy_world.heldout_untold(seed, n))
    return sum(right) / n


def share(verdicts: list[Verdict]) -> float:
    return sum(v.right for v in verdicts) / max(1, len(verdicts))


def table(verdicts: list[Verdict]) -> str:
    """Accuracy by distance and by kind of fact, as Markdown."""
    lines = ["| tokens ago | questions | right |", "|---|---|---|"]
    for low, high in zip(BUCKETS, BUCKETS[1:], strict=False):
        part = [v for v in verdicts if low < v.distance <= high]
        lines.append(f"| {low}-{high} | {len(part)} | {share(part):.1%} |")
    lines.append(f"| all | {len(verdicts)} | {share(verdicts):.1%} |")
    for kind in sorted({v.kind for v in verdicts}):
        part = [v for v in verdicts if v.kind == kind]
        lines.append(f"| all, {kind} | {len(part)} | {share(part):.1%} |")
    return "\n".join(lines)


# Training


def model_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=2,
        attn_implementation="eager",  # guidance needs attention weights
    )


class MasterWeights:
    """AdamW and Muon over float32 copies of a bfloat16 model's weights.

    Forward and backward passes run in bfloat16, four times as fast on a CPU with AMX; steps below
    bfloat16's resolution accumulate in the copies.
    """

    def __init__(self, model: LlamaForCausalLM, lr: float) -> None:
        self.weights = list(model.parameters())
        self.copies = [w.detach().float().clone().requires_grad_() for w in self.weights]
        hidden, embeddings, gains = [], [], []
        for (name, _), copy in zip(model.named_parameters(), self.copies, strict=True):
            kind = gains if copy.ndim < 2 else embeddings if "embed" in name else hidden
            kind.append(copy)
        groups = [
            {"params": embeddings, "weight_decay": 0.05},
            {"params": gains, "weight_decay": 0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=0),
            torch.optim.Muon(
                hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=5
            ),
        ]

    def step(self, lr: float) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)


def next_length(stage: int, rng: random.Random) -> int:
    """Length of the next batch's chats, mostly the longest so far."""
    return LENGTHS[stage] if rng.random() < 0.7 else rng.choice(LENGTHS[: stage + 1])


def rate_at(done: float, peak: float) -> float:
    """Learning rate: warm-up for 2 % of the time, then a cosine to nearly zero."""
    return peak * min(1.0, done / 0.02 + 0.01) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a training run."""

    folder: Path
    minutes: float
    seed: int
    lr: float
    batch_tokens: int
    processes: int


def average_gradients(weights: list[Tensor], processes: int) -> None:
    """Average the gradients over all processes."""
    if processes == 1:
        return
    flat = torch.cat([w.grad.flatten() for w in weights]).float()
    dist.all_reduce(flat)
    flat /= processes
    for weight, grad in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.grad.copy_(grad.view_as(weight))


def agree(value: float, processes: int) -> float:
    """Broadcast the first process's value."""
    shared = torch.tensor(value, dtype=torch.float64)
    if processes > 1:
        dist.broadcast(shared, 0)
    return shared.item()


def train(rank: int, plan: Plan, rendezvous: str) -> None:
    """Train for the planned time, in step with the other processes, and save the model.

    Single-threaded processes synchronize once per step; threads of one process would at every
    operation, and wait there for other users of the machine.
    """
    torch.set_num_threads(1)
    if plan.processes > 1:
        dist.init_process_group("gloo", f"file://{rendezvous}", None, plan.processes, rank)
    torch.manual_seed(plan.seed)
    lengths = random.Random(f"lengths/{plan.seed}")
    rng = random.Random(f"train/{plan.seed}/{rank}")
    sp = sentencepiece.SentencePieceProcessor(model_file=str(plan.folder / "tokenizer.model"))
    model = LlamaForCausalLM(model_config(sp.vocab_size())).bfloat16()
    master = MasterWeights(model, plan.lr)
    start, step, stage, mastery = time.time(), 0, 0, 0.0
    while (took := agree(time.time() - start, plan.processes)) < 60 * plan.minutes:
        done = took / (60 * plan.minutes)
        if stage < len(LATEST) and (
            agree(mastery, plan.processes) > MASTERED or done > LATEST[stage]
        ):
            stage, mastery = stage + 1, 0.5
        tokens = next_length(stage, lengths)
        batch = make_batch(sp, rng, tokens, max(1, plan.batch_tokens // plan.processes // tokens))
        loss, right = losses_of(model, batch, GUIDANCE * max(0.0, 1 - 1.2 * done))
        loss.backward()
        average_gradients(master.weights, plan.processes)
        master.step(rate_at(done, plan.lr))
        step += 1
        if tokens == LENGTHS[stage]:
            mastery = 0.95 * mastery + 0.05 * right
        if rank == 0 and step % 25 == 0:
            print(f"{took:6.0f} s  step {step}  length {LENGTHS[stage]}  {mastery:.3f}", flush=True)
        if rank == 0 and step % 500 == 0:
            report_progress(plan.folder, model)
    if rank == 0:
        save_model(plan.folder, model)


def report_progress(folder: Path, model: LlamaForCausalLM) -> None:
    """Print a quick accuracy, and save the current weights."""
    verdicts = evaluate(folder, n=60, seed=1, model=model)
    parts = [
        f"{low}-{high}: {share([v for v in verdicts if low < v.distance <= high]):.0%}"
        for low, high in zip(BUCKETS, BUCKETS[1:], strict=False)
    ]
    print("    held-out", "  ".join(parts), f" all: {share(verdicts):.1%}", flush=True)
    save_model(folder, model)
    model.train()


# Saving


def save_model(folder: Path, model: LlamaForCausalLM) -> None:
    """Write the weights and the two configs in Hugging Face's layout."""
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.config.vocab_size,
        "hidden_size": model.config.hidden_size,
        "intermediate_size": model.config.intermediate_size,
        "num_hidden_layers": model.config.num_hidden_layers,
        "num_attention_heads": model.config.num_attention_heads,
        "num_key_value_heads": model.config.num_key_value_heads,
        "head_dim": model.config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.config.max_position_embeddings,
        "rms_norm_eps": model.config.rms_norm_eps,
        "rope_theta": model.config.rope_parameters["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": END,
        "pad_token_id": 2,
    }
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": 1, "eos_token_id": [END, 2], "pad_token_id": 2}
    write_json(folder / "generation_config.json", generation | {"do_sample": False})


def save_tokenizer_files(folder: Path) -> None:
    """Write the tokenizer's other files: special tokens and the chat template."""
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "</s>"}
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "special": True}
    flags["single_word"] = False
    extra = SPECIAL[3:]
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "sp_model_kwargs": {},
        **names,
        "additional_special_tokens": extra,
        "added_tokens_decoder": {
            str(i): {"content": token, **flags} for i, token in enumerate(SPECIAL)
        },
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    special = names | {"additional_special_tokens": extra}
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def between(low: float, high: float) -> Callable[[str], float]:
    """Parser of a flag: a number from ``low`` to ``high``, whole if ``low`` is."""
    kind = type(low)

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a {what} from {low} to {high}")
        return value

    return read


def main(argv: list[str] | None = None) -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=here / "demo-model")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only evaluate this model")
    add = parser.add_argument
    add("--questions", type=between(1, 10**6), default=1000, help="held-out questions to ask")
    add("--minutes", type=between(0.01, 10**5), default=22.0)
    add("--seed", type=between(0, 2**32), default=0)
    add("--processes", type=between(1, 256), default=2, help="processes of one thread each")
    add("--lr", type=between(1e-9, 1.0), default=4e-3)
    add("--batch-tokens", type=between(512, 2**24), default=4096)
    add("--vocab-size", type=between(300, 2**20), default=1280)
    args = parser.parse_args(argv)
    folder = args.evaluate or args.out
    if not args.evaluate:
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer(folder, args.seed, args.vocab_size)
        save_tokenizer_files(folder)
        plan = Plan(
            folder=folder,
            minutes=args.minutes,
            seed=args.seed,
            lr=args.lr,
            batch_tokens=args.batch_tokens,
            processes=args.processes,
        )
        with tempfile.TemporaryDirectory() as meeting:
            mp.spawn(train, (plan, f"{meeting}/rendezvous"), nprocs=args.processes)
    print(table(evaluate(folder, n=args.questions)))
    print(f"\nnot told, and answered so: {untold_accuracy(folder):.1%}")


if __name__ == "__main__":
    main()
