"""Other engines on the same model, prompts and machine, each in its own virtual environment."""
