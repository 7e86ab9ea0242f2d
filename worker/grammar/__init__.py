"""Answers held to a grammar: what can be asked for, its trial and compilation, and the matcher beside the sampler."""
