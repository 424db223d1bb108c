"""GET /docs: the OpenAPI document in Swagger UI, served locally so that it works without internet access."""
