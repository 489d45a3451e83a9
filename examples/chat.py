"""Chat with a model over all devices: ``chat.py -m DIR -gs auto``.

This is ``exkv chat`` with the model under ExLlamaV2's flag. The program is ``exkv/cli/chat``; start
reading at ``session.py``. ``minimal_chat.py`` is the same idea in 40 lines.
"""

from __future__ import annotations

import sys

from exkv.cli import chat
from exkv.cli.flags import Parser


def main(argv: list[str] | None = None) -> int:
    flags = Parser(prog="chat.py", description="Chat with a model.", allow_abbrev=False)
    flags.add_argument(
        "-m",
        "--model-dir",
        dest="model",
        required=True,
        metavar="PATH",
        help="the model's folder, or a GGUF file",
    )
    flags.add_argument(
        "--lazy", action="store_true", help="no effect: eager and lazy caches are the same"
    )
    chat.add_flags(flags)
    return chat.run(flags.parse_args(argv), "chat.py")


if __name__ == "__main__":
    sys.exit(main())
