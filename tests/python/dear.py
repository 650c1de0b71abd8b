"""Expensive tests, of which `make test` runs only some cases."""

# `make test` draws a sixth of the cases of each of these tests, and at least one for each engine and each value of the parameters listed
# here. In full, these tests take two fifths of the time of tests/python (--durations=0). All other tests run in full.
DEAR = {
    "test_bounds.py": {"test_each_row_of_a_gradient": "shape"},
    "test_compat_flash_attn.py": {"test_a_compiled_call_refuses_as_an_eager_one": ""},
    "test_compat_transformers_masks.py": {
        "test_a_model_with_its_mask_functions": "",
        "test_compiled": "",
        "test_generates_the_same": "",
        "test_gradient_checkpointing": "",
        "test_packed_sequences": "",
    },
    "test_corners.py": {"test_head_dims": "dtype", "test_long_and_thin": "", "test_many_heads": ""},
    "test_decode.py": {"test_is_right_and_so_is_the_backward_after_it": "name"},
    "test_distributed.py": {"test_case": ""},
    "test_distributed_ranks.py": {"test_ways_to_call": "method"},
    "test_emulated_blocks.py": {
        "test_full_blocks_do_not_ask_the_function": "",
        "test_lists_are_those_of_the_cpu": "",
        "test_random_functions": "",
    },
    "test_emulated_captured.py": {"test_each_way_of_summing": "", "test_more_reads_than_a_set_holds": ""},
    "test_emulated_contract.py": {"test_as_on_a_gpu": ""},
    "test_emulated_eight_bits.py": {"test_products": ""},
    "test_emulated_few_queries.py": {"test_they_are_right": ""},
    "test_emulated_functions.py": {"test_they_are_right": "", "test_what_pairs_share_is_computed_ahead": ""},
    "test_emulated_latent.py": {"test_they_are_right": ""},
    "test_emulated_packed.py": {"test_each_tile_is_computed_once": "lengths"},
    "test_emulated_quantised.py": {"test_dequantised_first": "", "test_the_bits_are_those_over_a_dequantised_cache": ""},
    "test_emulated_turns.py": {"test_lists_that_contradict_their_transpose": ""},
    "test_emulated_wide_backward.py": {"test_gradients": ""},
    "test_fields.py": {"test_a_copy_that_strobe_hpp_does_not_make": "", "test_an_option_that_strobe_hpp_lacks": ""},
    "test_figures.py": {"test_either_letter_of_two_asks_for_their_figure": ""},
    "test_function_compile.py": {"test_what_is_refused_has_the_same_words": ""},
    "test_invariant.py": {"test_mixes": "dtype"},
    "test_known_bugs.py": {"test_alibi_measures_from_the_aligned_diagonal": "dtype"},
    "test_ladder.py": {"test_lengths": "rung", "test_tiles": "rung"},
    "test_many_keys.py": {
        "test_a_key_beside_which_each_of_the_others_rounds_away": "sq invariant",
        "test_a_key_beside_which_sums_of_the_others_round_away": "invariant",
        "test_few_queries_many_keys": "",
        "test_scores_that_crowd_near_a_few_values": "",
    },
    "test_memory.py": {"test_extra_memory_per_token": ""},
    "test_parts.py": {"test_any_cut_is_the_whole": "", "test_large_lse": "dtype"},
    "test_quantised.py": {"test_few_queries": "shape", "test_many_queries": "options", "test_options": "options"},
    "test_seqused.py": {
        "test_decoding_over_uneven_lengths": "options",
        "test_dense": "name",
        "test_few_queries": "options",
        "test_packed": "name",
    },
    "test_torch_op.py": {"test_every_function_may_stand_in_what_is_compiled": "", "test_opcheck": ""},
}
SHARE = 6
# Files of tests from end to end, each of which takes half a minute: `make test` draws one of the files.
ENDS = ("test_figures.py", "test_notebook.py", "test_serve.py", "test_train_ranks.py")
