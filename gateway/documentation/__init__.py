"""GET /docs: the OpenAPI description in Swagger UI, which is served from here and works without internet access."""
