"""Image towers, which exkv doesn't run."""

from .gone import gone, missing_from

ExLlamaV2MultimodalProjector = gone("ExLlamaV2MultimodalProjector", __name__)
ExLlamaV2VisionTower = gone("ExLlamaV2VisionTower", __name__)

__getattr__ = missing_from(__name__)
