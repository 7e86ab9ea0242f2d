"""The benchmark: an open-loop load, its statistics, the search for a capacity. Loads no torch, ray or matplotlib."""
