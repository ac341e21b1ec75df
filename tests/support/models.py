"""Sizes of the tiny Hugging Face models of the tests."""

SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
