"""`python -m tests.chaos.many_streams URL FOLDER STREAMS TOKENS`: a client process of its own, with all streams open at
once. Prints one line of JSON: faults, most streams that had begun and not ended at once, the time all of it took.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from tests.chaos.client import Stream, ask, session
from tests.chaos.paced import Expected, body

_LOOK_PERIOD_S = 0.05


async def run(url: str, num_streams: int, num_tokens: int) -> tuple[list[dict[str, object]], list[Stream], int]:
    bodies = [body([5 + i % 200, 5 + i // 200, 7], num_tokens, temperature=i % 2, seed=i) for i in range(num_streams)]
    streams = [Stream() for _ in bodies]
    async with session(url) as http:
        asking = [asyncio.create_task(ask(http, one, stream)) for one, stream in zip(bodies, streams, strict=True)]
        most_open = 0
        while not all(task.done() for task in asking):
            most_open = max(most_open, sum(stream.is_open for stream in streams))
            await asyncio.sleep(_LOOK_PERIOD_S)
        await asyncio.gather(*asking)
    return bodies, streams, most_open


def main() -> None:
    url, folder, num_streams, num_tokens = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    began_s = time.monotonic()
    bodies, streams, most_open = asyncio.run(run(url, num_streams, num_tokens))
    took_s = time.monotonic() - began_s
    faults = Expected(folder).faults(bodies, streams)
    print(json.dumps({"faults": faults[:5], "most_open": most_open, "took_s": round(took_s, 1)}))


if __name__ == "__main__":
    main()
