"""What is known of the autoscaler's choices."""

from monitoring.metric import SCALER, gauge

SCALER_METRICS = (
    gauge(
        "stallfree_scaling_workers",
        "Numbers of workers where an autoscaler chooses: how many it wants, how many it has asked for after bounds and "
        "delays, how many run, how many have reported to it, and its bounds",
        SCALER,
        "kind",
        *("wanted", "asked", "running", "reported", "fewest", "most"),
    ),
    gauge(
        "stallfree_scaling_seen_demand",
        "Demand on all workers, in workers, as the autoscaler saw it: a mean of what they reported of late",
        SCALER,
        "resource",
        "tokens",
        "sequences",
    ),
)
