"""SGLang's official door for multimodal processors: `SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE` names this package, and SGLang
imports every module of it. One that fails to import is only logged, so the engine looks at what it got."""
