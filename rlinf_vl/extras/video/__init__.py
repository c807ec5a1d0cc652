"""Videos in rows and messages: their files, decoded and sampled to clips."""
