"""What `pagedjax bench` measures: this engine, its scheduler alone, and `transformers` on the same requests."""
