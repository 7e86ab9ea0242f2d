#!/usr/bin/env bash
# Installs Stallfree with what constraints.txt pins into a new virtual environment, and checks that it is what the image
# is named for. The Dockerfile runs it; it runs on any machine, from the root of a checkout:
#
#   k8s/image/install.sh TARGET cpu|cuda
#
# pip's own configuration and environment say where packages come from. WITH_DEMO_MODEL=1 adds the demo model.
set -euo pipefail

target=${1:?where the virtual environment is to be}
variant=${2:?cpu or cuda}
case $variant in cpu | cuda) ;; *) echo "there is no variant $variant, only cpu and cuda" >&2 && exit 2 ;; esac

python3 -m venv "$target"
python=$target/bin/python
"$python" -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[tracing]'

# From elsewhere, so that nothing is imported from the checkout.
cd /
# pip takes whichever build of torch it finds: the wrong one would work, slowly, or weigh gigabytes too much.
"$python" - "$variant" <<'CHECK'
import sys
import torch

found = "cpu" if torch.version.cuda is None else "cuda"
sys.exit(0 if found == sys.argv[1] else f"asked for {sys.argv[1]}, but pip found torch {torch.__version__}")
CHECK
"$python" -c 'import deployments.app, deployments.node_drain, monitoring, worker.engine'
"$target/bin/stallfree" --help >/dev/null
"$target/bin/ray" --version
"$target/bin/serve" --help >/dev/null

if [ "${WITH_DEMO_MODEL:-0}" = 1 ]; then
  # a fixed name, for the overlay cpu-demo
  "$python" -c 'import sys, pathlib, worker.demo_model as demo
folder = pathlib.Path(sys.argv[1])
folder.joinpath("demo").symlink_to(demo.ensure_demo_model(folder).name)' "$target/models"
fi
