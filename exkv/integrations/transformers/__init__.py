"""exkv's caches and attention under stock ``transformers`` models and stock ``generate()``.

``HFCache(model.config, kind="quantized", nbits=8)`` is a cache for ``generate(cache=...)``, and
``model.set_attn_implementation("exkv")`` lets attention read it as it is stored. Read ``cache.py``,
``layer.py`` and ``attention.py`` next.
"""

_NEEDS = "exkv.integrations.transformers needs transformers 4.57, or 5.20 or later"

try:
    import transformers  # before other imports here, for a clear error
except ImportError as error:
    raise ImportError(f"{_NEEDS}: pip install 'exkv[hf]'") from error
_version = tuple(map(int, transformers.__version__.split(".")[:2]))
if _version < (4, 57) or (5,) <= _version < (5, 20):
    raise ImportError(
        f"{_NEEDS}, whose caches consist of layers; transformers {transformers.__version__} is "
        "installed: pip install -U 'exkv[hf]'"
    )

from .attention import register
from .cache import HFCache
from .enabling import disable, enable
from .exporting import register_export_support
from .layer import HFLayer
from .placing import plan_device_map
from .resilient import resilient_generate

register()

__all__ = [
    "HFCache",
    "HFLayer",
    "disable",
    "enable",
    "plan_device_map",
    "register_export_support",
    "resilient_generate",
]
