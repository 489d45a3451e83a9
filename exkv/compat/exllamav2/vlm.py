"""Image towers, which exkv doesn't run."""

from .gone import gone

ExLlamaV2MultimodalProjector = gone("ExLlamaV2MultimodalProjector", __name__)
ExLlamaV2VisionTower = gone("ExLlamaV2VisionTower", __name__)
