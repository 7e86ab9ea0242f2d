# The image of KubeRay's head and workers: Python, the packages, and what KubeRay's probes call. No server of ours starts
# by itself: KubeRay gives the command.
#
#   docker build --build-arg VARIANT=cuda -t stallfree:0.1.0-cuda .
#   docker build --build-arg VARIANT=cpu --build-arg PIP_EXTRA_INDEX_URL=... -t stallfree:0.1.0-cpu .
#   ... --build-arg VARIANT=cpu --build-arg WITH_DEMO_MODEL=1 -t stallfree:0.1.0-cpu-demo .
#
# The CUDA libraries are wheels that torch depends on; the driver comes from the node. So both variants have one base. pip
# finds CPU builds of torch in an index of PyTorch's own, which PIP_EXTRA_INDEX_URL names; the build fails if the other
# kind was found. Pin the bases by digest, too, where you can look it up.

FROM python:3.11.14-slim-trixie AS build
ARG VARIANT=cuda
# seen by pip in the script, and not kept in the final image
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG WITH_DEMO_MODEL=0
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY k8s/image/install.sh k8s/image/
COPY kv_cache kv_cache
COPY scheduler scheduler
COPY worker worker
COPY monitoring monitoring
COPY deployments deployments
# /opt/stallfree in both stages: a virtual environment knows its own path.
RUN k8s/image/install.sh /opt/stallfree "$VARIANT"

FROM python:3.11.14-slim-trixie
# bash and wget: KubeRay's start command and probes. g++: the CPU kernels are compiled for the processor that they run on,
# once, into the cache volume; Triton compiles its launchers with it. Versions are those of the base's Debian release:
# a point release takes older ones away.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 stallfree \
    && useradd --uid 1000 --gid 1000 --create-home --home-dir /var/lib/stallfree stallfree
COPY --from=build /opt/stallfree /opt/stallfree
# Nothing is written below /opt or the home folder: caches go to a volume, Ray's session to /tmp.
ENV PATH=/opt/stallfree/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/var/cache/stallfree \
    HF_HOME=/var/cache/stallfree/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN install -d -o 1000 -g 1000 /var/cache/stallfree
# by number: Kubernetes' runAsNonRoot cannot tell who a name is
USER 1000:1000
WORKDIR /var/lib/stallfree
CMD ["stallfree", "--help"]
