"""ExLlamaV2's interface over exkv: scripts run after changing their import lines.

``from exkv.compat.exllamav2 import ExLlamaV2, ...``; or unchanged, with
``python -m exkv.compat.exllamav2 script.py``. Each object's ``exkv`` is the exkv object behind it.

Read on in ``model.py``, ``cache.py`` and ``generator/base.py``; ``missing.py`` has the names that
exkv doesn't have.
"""

from . import generator, model_init
from .cache import (
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
)
from .config import ExLlamaV2Config
from .lora import ExLlamaV2Lora
from .missing import NotHere, missing_from
from .model import ExLlamaV2
from .module import Intervention
from .serving import serve
from .tokenizer import ExLlamaV2Tokenizer
from .util import SeqTensor, Timer
from .version import __version__
from .vlm import ExLlamaV2MultimodalProjector, ExLlamaV2VisionTower

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "ExLlamaV2MultimodalProjector",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "Intervention",
    "NotHere",
    "SeqTensor",
    "Timer",
    "__version__",
    "generator",
    "model_init",
    "serve",
]

__getattr__ = missing_from(__name__)
