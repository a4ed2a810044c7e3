"""What trained towers can do, measured: retrieval, zero-shot classification, the error of normalizer estimates."""
