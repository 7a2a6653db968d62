"""What users write: pipelines, options, messages and the rules of their values."""
