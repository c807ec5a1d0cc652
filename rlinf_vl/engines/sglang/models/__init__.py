"""Models for SGLang. `SGLANG_EXTERNAL_MODEL_PACKAGE` names this package."""
