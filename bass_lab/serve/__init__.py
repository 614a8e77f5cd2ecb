"""One pair behind an OpenAI-compatible HTTP API, in one process: `bass serve`."""

NEEDS = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `serve`
