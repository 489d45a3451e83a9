"""Image towers, which exkv doesn't run."""

from .missing import missing_from, placeholder

ExLlamaV2MultimodalProjector = placeholder("ExLlamaV2MultimodalProjector", __name__)
ExLlamaV2VisionTower = placeholder("ExLlamaV2VisionTower", __name__)

__getattr__ = missing_from(__name__)
