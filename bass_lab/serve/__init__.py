"""One pair behind an OpenAI-compatible HTTP API, in one process: `bass serve`."""
