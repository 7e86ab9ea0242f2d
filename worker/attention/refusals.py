"""Why an attention backend does not run a model here, and by which option that can be changed."""

from collections.abc import Iterator
from dataclasses import dataclass

from worker.attention.backend import AttentionBackend, AttentionFeatures, AttentionNeeds


@dataclass(frozen=True, slots=True)
class Refusal:
    """`reason` names the backend; `option` is the one that asked for what it lacks."""

    option: str
    reason: str


def refusal(backend_type: type[AttentionBackend], needs: AttentionNeeds) -> Refusal | None:
    """The first thing that the backend lacks for these needs, or None. What takes long is looked at last."""
    name = backend_type.name
    for option, reason in _unmet(backend_type.features, needs):
        return Refusal(option, f"{name} {reason}")
    missing = backend_type.missing(needs.device)
    return None if missing is None else Refusal("attention_backend", f"{name} cannot be used: {missing}")


def _unmet(features: AttentionFeatures, needs: AttentionNeeds) -> Iterator[tuple[str, str]]:
    if features.device_types and needs.device not in features.device_types:
        yield "attention_backend", f"does not run on {needs.device}"
    least = features.min_capability
    if least is not None and needs.capability is not None and needs.capability < least:
        has, asked = (".".join(map(str, capability)) for capability in (needs.capability, least))
        yield "attention_backend", f"needs compute capability {asked}, and this device has {has}"
    if features.dtypes and needs.dtype not in features.dtypes:
        yield "dtype", f"does not run {needs.dtype}"
    if features.max_head_size is not None and needs.head_size > features.max_head_size:
        yield "attention_backend", f"does not run heads of {needs.head_size}: {features.max_head_size} is the largest"
    if needs.head_size % features.head_size_multiple:
        yield (
            "attention_backend",
            f"does not run heads of {needs.head_size}: they must be a multiple of {features.head_size_multiple}",
        )
    if needs.block_size is not None and needs.block_size % features.block_size_multiple:
        yield "block_size", f"needs a multiple of {features.block_size_multiple}, and {needs.block_size} is none"
    for feature, words in (
        ("softcap", "attention logit softcapping"),
        ("sinks", "attention sinks"),
        ("sliding_window", "sliding windows"),
    ):
        if getattr(needs, feature) and not getattr(features, feature):
            yield "attention_backend", f"does not implement {words}, which this model needs"
