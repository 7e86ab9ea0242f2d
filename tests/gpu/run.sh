#!/usr/bin/env bash
# The check on one GPU, in under ten minutes; needs torch, Transformers and this repository, nothing installed.
#   tests/gpu/run.sh [--dry-run] [--only PART,PART] [--json FILE]
# PYTHON names the interpreter; without it the repository's own environment is taken where there is one.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x "$root/.venv/bin/python" ] && PYTHON="$root/.venv/bin/python"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then
    # Before Triton is imported. What waits for its turn on the CPU must not take the turns of the others.
    export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES="" OMP_WAIT_POLICY=passive
  fi
done
# Not from the folder that the user stands in (-P), which paths of files are relative to.
exec "$PYTHON" -P -m tests.gpu "$@"
