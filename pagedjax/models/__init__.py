"""Models: one file per family, shared layers, and how weights and tokenizers get here."""
