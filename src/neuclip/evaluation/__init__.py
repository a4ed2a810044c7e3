"""Measures a trained model: retrieval, zero-shot classification, the error of normalizer estimates."""
