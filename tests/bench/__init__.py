"""Benches. A package, so that pytest puts ``tests/`` on ``sys.path`` and not this folder, whose
``kernels.py`` transformers would import as the package of that name."""
