"""Serve a pair of models over an OpenAI-compatible HTTP API, in a single process: `bass serve`."""

NEEDS = ("fastapi", "uvicorn", "prometheus_client")  # packages of the extra `serve`
