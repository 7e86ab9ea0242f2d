"""The whole of it: `stallfree serve` with a real model, asked over HTTP as clients ask it."""
