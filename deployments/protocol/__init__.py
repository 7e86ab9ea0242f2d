"""The OpenAI protocol: request models, their checks, response objects, error objects."""
