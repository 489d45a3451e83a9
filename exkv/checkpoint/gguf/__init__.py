"""GGUF, llama.cpp's file format: a model in one file, or its parts ``-00001-of-0000N``.

``header`` reads the header of a file, ``contents`` joins those of all parts, ``metadata`` converts
them to a config, ``names`` and ``tensors`` provide the tensors under Hugging Face's names. The
tokenizer is in ``exkv/text/gguf.py``, the weight formats in ``exkv/weights/gguf.py``.
"""
