"""exkv's caches and attention under stock ``transformers`` models and stock ``generate()``.

``HFCache(model.config, kind="quantized", nbits=8)`` is a cache for ``past_key_values=``, and
``model.set_attn_implementation("exkv")`` lets attention read it as it is stored. The reader goes
next to ``cache.py``, ``layer.py`` and ``attention.py``.
"""

try:
    import transformers  # noqa: F401  # to say what is missing before a file here asks for it
except ImportError as error:
    raise ImportError(
        "exkv.integrations.transformers needs transformers 5.20 or later: pip install 'exkv[hf]'"
    ) from error

from .attention import register
from .cache import HFCache
from .enabling import disable, enable
from .layer import HFLayer
from .placing import plan_device_map
from .resilient import resilient_generate

register()

__all__ = ["HFCache", "HFLayer", "disable", "enable", "plan_device_map", "resilient_generate"]
