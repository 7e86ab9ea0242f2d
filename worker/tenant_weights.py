"""Shares of tenants as an option: "a=1,b=3" means that b gets three times what a gets. Knows no scheduler."""

from collections.abc import Mapping


def parse_tenant_weights(text: str | Mapping[str, float]) -> dict[str, float]:
    """Weights by tenant. ValueError for text that holds none; ranges are `worker.config`'s to check."""
    if not isinstance(text, str):
        return dict(text)
    weights: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        tenant, equals, weight = part.rpartition("=")
        if not equals or tenant in weights:
            raise ValueError(f"must be TENANT=WEIGHT, each tenant once, such as a=1,b=3; got {text!r}")
        try:
            weights[tenant] = float(weight)
        except ValueError:
            raise ValueError(f"the weight of {tenant!r} is not a number: {weight!r}") from None
    return weights
