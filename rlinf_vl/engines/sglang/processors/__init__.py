"""Multimodal processors for SGLang.

`SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE` names this package, and SGLang imports every module of it. It
only logs an import that fails, so the engine checks which processor it has got.
"""
