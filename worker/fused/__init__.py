"""A decoder for models built like Llama, with merged projections: by our CPU kernels, or by torch alone."""
