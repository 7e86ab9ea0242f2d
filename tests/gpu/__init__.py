"""The check on one GPU: `run.sh`. Needs torch, Transformers and this repository alone."""
