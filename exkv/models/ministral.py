"""Ministral 8B (Mistral AI, 2024), as transformers 5 names it: a Mistral whose config says layer by
layer which have a window."""

from dataclasses import replace

from . import mistral

FAMILY = replace(mistral.FAMILY, architecture="MinistralForCausalLM", model_type="ministral")
