"""Search forty diverse beams over one long prompt, on any card: the prompt is stored once for all
beams, and if memory still runs out, the cache moves to the host and the search continues from the
token where it stopped.

``python examples/resilient_beams.py DIR [--beams N] [--cache KIND] [--simulate SIZES]``, e.g.
``--simulate 5M`` for a card too small for the demo model's beams, or ``64M`` for one large enough.
"""

import argparse
import sys

from toy_world import NAMES, OBJECTS, ROOMS

from exkv import CACHES, Cache, Fallback, Model, Tokenizer, sim

FACTS = [(NAMES[i % 40], thing, ROOMS[i % 20]) for i, thing in enumerate(OBJECTS[:-1])]
STORY = " ".join(f"{name} put the {thing} in the {room}." for name, thing, room in FACTS)
QUESTION = "Where is the cup?"
ROOM = 64  # tokens for each answer


def say(fallback: Fallback) -> None:
    before, after = (
        " and ".join(f"{size:,} bytes on {device}" for device, size in sizes.items())
        for sizes in (fallback.before, fallback.after)
    )
    print(
        f"  ({fallback.during} at token {fallback.token} found no room: {fallback.step}; the cache "
        f"went from {before} to {after})",
        file=sys.stderr,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="many beams on a small card")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--beams", type=int, default=40)
    parser.add_argument("--cache", choices=CACHES, default="fp16", help="the kind of cache")
    parser.add_argument("--simulate", metavar="SIZES", help="simulated cards, e.g. 5M or 4M,8M")
    args = parser.parse_args(argv)
    if args.beams % 2 or not 2 <= args.beams <= 4096:
        parser.error(f"--beams is {args.beams}: groups of two need an even number from 2 to 4096")
    if args.simulate:
        try:
            sim.enable(args.simulate)
        except ValueError as error:
            parser.error(f"--simulate: {error}")

    model, tokenizer = Model(args.folder), Tokenizer(args.folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": f"{STORY} {QUESTION}"}])
    # Planned for the prompt only; the beams come on top, and may not fit.
    model.load_autosplit(Cache(model, max_seq_len=len(ids)), last_id_only=True)
    out = model.generate(
        [ids],
        num_beams=args.beams,
        num_beam_groups=args.beams // 2,
        num_return_sequences=args.beams,
        diversity_penalty=1.0,
        max_new_tokens=ROOM,
        eos_token_id=(),  # all beams at full length, to store more
        cache_implementation=args.cache,
        on_fallback=say,
        return_dict_in_generate=True,
    )
    for answer in out.sequences[:, len(ids) :].tolist():
        print(tokenizer.decode(answer).strip())
    steps = ", ".join(fallback.step for fallback in out.fallbacks) or "none"
    print(f"  (prompt: {len(ids)} tokens, beams: {args.beams}, steps: {steps})", file=sys.stderr)


if __name__ == "__main__":
    main()
