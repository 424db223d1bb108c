"""GET /docs: the OpenAPI document in Swagger UI. GET /docs/errors: all error codes. Neither needs the internet."""
