"""llama.cpp's own converter (``golden.py``), in a process of its own with the ``gguf`` package that
comes with it.

Run as a script it reads lines ``FOLDER<tab>FILE<tab>HOW`` and answers each with a line: nothing, or
what went wrong. Only its vocabulary step is left out (``tokenizer.ggml.model`` is ``none``) unless
it is asked for, as most tiny models have no tokenizer that it knows.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class Converter:
    """The process. A call converts a folder to a file, RuntimeError with the converter's traceback
    where it can't. ``how`` are words: the matrices' type, ``f32`` or ``q8_0``; ``fuse_qkv`` and
    ``fuse_gate_up_exps``, its options; ``heads`` with those for several tokens (MTP);
    ``vocabulary`` with the tokenizer."""

    def __init__(self, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, folder: Path, file: Path, how: str = "f32") -> None:
        self._process.stdin.write(f"{folder}\t{file}\t{how}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer != "\n":
            raise RuntimeError(answer.rstrip().replace("\\n", "\n") or "the converter has ended")

    def close(self) -> None:
        self._process.communicate()


def main(source: str) -> None:
    """Convert what standard input names."""
    sys.path[:1] = [source, f"{source}/gguf-py"]  # in place of this folder, which has a gguf.py
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    logging.disable(logging.ERROR)
    types = {"f32": gguf.LlamaFileType.ALL_F32, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}

    def set_no_vocab(converter: Any) -> None:
        converter._set_vocab_none()
        converter.gguf_writer.add_vocab_size(converter.hparams["vocab_size"])  # llama.cpp asks

    own_vocabulary: dict[type, Any] = {}

    def adapt(converter: type, *, heads: bool, vocabulary: bool) -> None:
        """Leave out what isn't asked for, also in classes of which one chooses by config.json."""
        own = own_vocabulary.setdefault(converter, converter.set_vocab)
        converter.set_vocab = own if vocabulary else set_no_vocab
        converter.no_mtp = converter.supports_mtp_export and not heads
        for each in vars(converter).values():
            if isinstance(each, type):
                adapt(each, heads=heads, vocabulary=vocabulary)

    def convert(folder: Path, file: Path, kind: str, *options: str) -> None:
        hparams = ModelBase.load_hparams(folder, False)
        converter = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        adapt(converter, heads="heads" in options, vocabulary="vocabulary" in options)
        fused = {option: True for option in options if option.startswith("fuse_")}
        with torch.inference_mode():
            converter(folder, types[kind], file, model_name="tiny", **fused).write()

    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        folder, file, how = line.rstrip("\n").split("\t")
        try:
            convert(Path(folder), Path(file), *how.split())
            said = ""
        except Exception:
            said = traceback.format_exc().replace("\n", "\\n")
        print(said, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
