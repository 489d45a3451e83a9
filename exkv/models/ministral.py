"""Ministral 8B (Mistral AI, 2024), as transformers 5 names it: a Mistral whose config says for each
layer whether it has a window."""

from dataclasses import replace

from . import mistral

FAMILY = replace(mistral.FAMILY, architecture="MinistralForCausalLM", model_type="ministral")
