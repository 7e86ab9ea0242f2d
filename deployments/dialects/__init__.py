"""APIs beside OpenAI's chat and completions, over the same jobs: their requests, answers, errors and routes."""
