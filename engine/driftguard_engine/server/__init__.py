"""The HTTP server: OpenAI's API, the admin API, /metrics, and the thread that runs the engine."""
