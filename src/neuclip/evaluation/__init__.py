"""Measures a trained model: retrieval, zero-shot classification, DataComp's tasks and the normalizer error."""
