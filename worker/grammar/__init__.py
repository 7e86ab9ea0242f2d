"""Answers held to a grammar: what clients may ask for, its trial and compilation, and the matcher beside the sampler."""
