"""The dynamic generator and its jobs, which have other names in exkv: see ``exkv.engine``."""

from exkv.compat.exllamav2.gone import gone, missing_from

ExLlamaV2DynamicGenerator = gone("ExLlamaV2DynamicGenerator", __name__)
ExLlamaV2DynamicJob = gone("ExLlamaV2DynamicJob", __name__)
ExLlamaV2DynamicGeneratorAsync = gone("ExLlamaV2DynamicGeneratorAsync", __name__)
ExLlamaV2DynamicJobAsync = gone("ExLlamaV2DynamicJobAsync", __name__)
ExLlamaV2MMEmbedding = gone("ExLlamaV2MMEmbedding", __name__)

__getattr__ = missing_from(__name__)
