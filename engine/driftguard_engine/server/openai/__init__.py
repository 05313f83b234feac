"""OpenAI's API: request bodies, routes, response bodies, server-sent events."""
