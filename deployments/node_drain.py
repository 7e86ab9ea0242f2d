"""`python -m deployments.node_drain`: tells Ray that a node will go, and waits until Serve has nothing left on it.

For whoever is about to stop a node and can wait, such as a hook that runs before a pod is ended. Serve starts the
node's replicas elsewhere and stops those here gently once the new ones are up, or `drain_timeout_s` before the
deadline: with a deadline that is no longer than that, at once, and nobody serves meanwhile. Then its proxy's requests
end. Knows nothing of what runs in the replicas.
"""

import argparse
import sys
import time
from typing import Any, Protocol

from ray._private.services import get_node_ip_address
from ray._private.state import GlobalState
from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

#: how Serve's actors are named: they alone hold streams
SERVE_ACTOR_PREFIXES = ("SERVE_REPLICA::", "SERVE_PROXY_ACTOR")
POLL_PERIOD_S = 1.0


class DrainError(RuntimeError):
    """The node cannot be drained; the message says why."""


class Nodes(Protocol):
    """What a drain asks of a cluster."""

    def alive(self) -> dict[str, str]:
        """Addresses of the nodes that are up, by their hexadecimal ids."""

    def drain(self, node_id: str, deadline_s: float) -> None:
        """From now on nothing new is placed there. `deadline_s` from now the node may be gone. Raises `DrainError`."""

    def serve_actors(self, node_id: str) -> list[str]:
        """Names of those that run there."""


class RayNodes:
    """`Nodes` of the cluster whose GCS is at `address`, without joining it."""

    def __init__(self, address: str) -> None:
        self._gcs = GcsClient(address=address)
        self._state = GlobalState()  # type: ignore[no-untyped-call]
        self._state._initialize_global_state(
            GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )

    def alive(self) -> dict[str, str]:
        table: list[dict[str, Any]] = self._state.node_table()  # type: ignore[no-untyped-call]
        return {node["NodeID"]: node["NodeManagerAddress"] for node in table if node["Alive"]}

    def drain(self, node_id: str, deadline_s: float) -> None:
        is_accepted, reason = self._gcs.drain_node(
            node_id,
            DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,  # the other reason is refused where anything runs
            "the node is about to be stopped",
            int((time.time() + deadline_s) * 1000),
        )
        if not is_accepted:
            raise DrainError(f"Ray refuses to drain the node {node_id}: {reason}")

    def serve_actors(self, node_id: str) -> list[str]:
        actors: dict[str, dict[str, Any]] = self._state.actor_table(None, actor_state_name="ALIVE")
        names = [str(actor["Name"]) for actor in actors.values() if actor["Address"]["NodeID"] == node_id]
        return sorted(name for name in names if name.startswith(SERVE_ACTOR_PREFIXES))


def node_at(nodes: Nodes, ip_address: str) -> str:
    """The id of the one node that is up there. Raises `DrainError` if there is none, or several."""
    found = [node_id for node_id, address in nodes.alive().items() if address == ip_address]
    if len(found) != 1:
        raise DrainError(f"{len(found)} nodes are up at {ip_address}; name one with --node-id")
    return found[0]


def drain(nodes: Nodes, node_id: str, deadline_s: float) -> list[str]:
    """Returns when Serve has nothing there, or at the deadline, with the names of what still runs."""
    ends_s = time.monotonic() + deadline_s
    nodes.drain(node_id, deadline_s)
    while left := nodes.serve_actors(node_id):
        if time.monotonic() >= ends_s:
            break
        time.sleep(min(POLL_PERIOD_S, max(ends_s - time.monotonic(), 0.0)))
    return left


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deployments.node_drain", description=__doc__)
    parser.add_argument("--address", required=True, help="the GCS, as host:port")
    parser.add_argument("--node-id", help="by default the node at this machine's address")
    parser.add_argument("--deadline-s", type=float, required=True, help="how long the node may take")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of(sys.argv[1:])
    nodes = RayNodes(options.address)
    try:
        own_address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        node_id = options.node_id or node_at(nodes, own_address)
        print(f"draining the node {node_id} for up to {options.deadline_s:g} s", flush=True)
        left = drain(nodes, node_id, options.deadline_s)
    except DrainError as error:
        print(error, file=sys.stderr)
        return 1
    if left:
        print(f"still there: {', '.join(left)}", file=sys.stderr)
        return 1
    print("nothing of Serve is left on it", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
