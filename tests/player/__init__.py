"""A model that plays what a test has written down: an engine of real workers, for real clients that call tools.

Everything else is the product: the prompt is rendered by a chat template that knows tools and reasoning, the calls are
written in the model's own dialect and parsed by the gateway, answers obey the request's grammar, and an attempt that is
lost continues on another worker.
"""
