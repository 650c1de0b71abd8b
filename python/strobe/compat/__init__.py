"""Other libraries' signatures over strobe.attention, a module each; docs/compat.md lists what differs.

- flash_attn: the functions of the flash-attn package, importable in its place
- sdpa: torch.nn.functional.scaled_dot_product_attention, importable in its place
- transformers: an attention implementation of Hugging Face transformers, attn_implementation="strobe"
- learned_scale: FlashAttention(head_dim=64), whose softmax scale is a parameter; flash_attention(Q, K, V)
- block_sizes: flash_attention_forward(Q, K, V, Bc, Br, use_half) and its backward
- ladder: flash_attention_1_forward, flash_attention_2_forward and their backwards, the papers' algorithms themselves
- functional: the paper's forms, with mask, dropout and its RNG state in and out, block-sparse
"""
