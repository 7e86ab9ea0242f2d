"""Servers of other projects beside ours, each in its own environment, for a comparison through HTTP."""
