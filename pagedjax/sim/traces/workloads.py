"""The workloads that are known by name, and the files that hold their real lengths."""

from __future__ import annotations

FILES: dict[str, tuple[str, ...]] = {
    "sharegpt": ("sharegpt_paper_lengths.csv.gz",),
    "sharegpt-v3": ("sharegpt_v3_first_turn_lengths.csv.gz", "ShareGPT_V3_unfiltered_cleaned_split.json"),
    "alpaca": ("alpaca_lengths.csv.gz", "alpaca_data.json"),
    "sharegpt-multiturn": (
        "sharegpt_multiturn_8k_lengths.csv.gz",
        "sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
    ),
    "arxiv": (
        "arxiv_summarization_lengths.csv.gz",
        "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
    ),
    "azure-conv": ("azure2023_conv_trace.csv.gz", "AzureLLMInferenceTrace_conv.csv"),
    "translation": ("translation_en_de_ntrex.tsv.gz",),
    "mooncake-conv": ("mooncake_conversation_trace.npz", "conversation_trace.jsonl"),
}
"""The compact file of each workload, and the public one that it was made of, where one of these formats has it."""
