"""A Llama-architecture decoder on paged attention: loading, tokenising, scheduling and the compiled step.

Dimensions in the shapes of this package: T tokens of one step, S sequence slots, M block-table columns, P pages of the
cache, V vocabulary, E hidden size, F feed-forward size, Hq query heads, Hkv key/value heads, D head dimension.
"""
