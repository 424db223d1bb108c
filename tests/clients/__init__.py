"""The clients that teams use, as they come from their registries, against one running Spillway whose model plays.

Each does what its users do: chat, streams, a round trip through tools, structured output, vectors, logprobs; and meets
errors as its own types, and retries as it sees fit.
"""
