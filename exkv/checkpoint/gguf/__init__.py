"""GGUF, llama.cpp's file format: a model in one file, or its parts ``-00001-of-0000N``.

``header`` reads what a file says, ``contents`` holds it for all parts, ``metadata`` makes a config
of it, ``names`` and ``tensors`` give the tensors to a load under Hugging Face's names. The
tokenizer is in ``exkv/text/gguf.py``, the formats of weights in ``exkv/weights/gguf.py``.
"""
