"""Tool calls and reasoning inside of an answer's text: how each family of models writes them, found as text arrives."""
