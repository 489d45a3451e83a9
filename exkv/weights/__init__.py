"""Weight formats: how the matrix of a linear layer is stored on disk and on a device.

``format`` defines what a format is, ``floats`` has the plain ones, and ``methods`` finds the
formats of a checkpoint's layers. A new format is a file here and an entry of ``methods.METHODS``;
its tests follow from the registry (tests/weights).
"""

from .experts import experts_of_formats
from .format import Layout, Size, Tensors, WeightFormat, products
from .groups import GroupFormat
from .methods import METHODS, FormatOf, format_named, formats, formats_of, register
from .source import Fused, Slice, Source, format_source, sliced_source, tensor_source

__all__ = [
    "METHODS",
    "FormatOf",
    "Fused",
    "GroupFormat",
    "Layout",
    "Size",
    "Slice",
    "Source",
    "Tensors",
    "WeightFormat",
    "experts_of_formats",
    "format_named",
    "format_source",
    "formats",
    "formats_of",
    "products",
    "register",
    "sliced_source",
    "tensor_source",
]
