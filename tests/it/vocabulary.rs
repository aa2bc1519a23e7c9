//! Words and phrases that this project has retired because the field has another word for the thing. None may come back.

use crate::layering::{files, root};
use std::fs;

/// A retired word or phrase.
struct Retired {
    /// One or more words. `*` at the beginning or the end of a word stands for any further letters, digits and `_`. A word
    /// with a capital letter matches in this spelling only, any other word matches in every spelling.
    pattern: &'static str,
    /// The word to use.
    instead: &'static str,
    /// Where the word stays: the beginning of the path, and the reason.
    stays_in: &'static [(&'static str, &'static str)],
}

const fn retired(pattern: &'static str, instead: &'static str) -> Retired {
    Retired { pattern, instead, stays_in: &[] }
}

impl Retired {
    #[allow(dead_code, reason = "the table may have no exception")]
    const fn except(self, stays_in: &'static [(&'static str, &'static str)]) -> Self {
        Self { stays_in, ..self }
    }
}

const RETIRED: &[Retired] = &[
    // Work partition and split-KV.
    retired("ShareWalk", "WorkRangeIterator"),
    retired("WorkList", "WorkPartitioner"),
    retired("RowShare", "RowPartition"),
    retired("RowSharing", "RowPartition"),
    retired("HeadSharing", "HeadPartition"),
    retired("num_shares", "num_ranges"),
    retired("write_share", "work range"),
    retired("share_out", "partition"),
    retired("shares out", "partitions"),
    retired("leave_cut", "split record"),
    retired("CutTile", "SplitRecord"),
    retired("CUT_BYTES", "SPLIT_RECORD_BYTES"),
    retired("Cutting", "KvSplit"),
    retired("cutting_", "kv_split_"),
    retired("merge_parts", "combine"),
    retired("MergeParams", "MergeStatesParams"),
    retired("part_begin", "split_begin"),
    retired("part_end", "split_end"),
    retired("max_spans", "max_fixed_splits"),
    retired("share out", "partition"),
    retired("kSpans", "kFixedSplits"),
    retired("kUnitKeys", "kKvChunkKeys"),
    retired("tile_units", "tile_chunks"),
    retired("MixedParams", "HopperFusedParams"),
    retired("MixedWork", "FusedWork"),
    retired("hopper_mixed", "hopper_fused"),
    retired("mixed kernel", "fused prefill and decode kernel"),
    retired("*unowned*", "padding rows"),
    retired("OwnedRows", "LiveRows"),
    retired("owned_rows", "live rows"),
    retired("OwnerSearch", "SequenceSearch"),
    retired("finish_rows", "finalize_rows"),
    retired("hand_over", "store_output, store_partial"),
    // TMA, WGMMA and pipelines.
    retired("copy engines", "TMA"),
    retired("copy engine", "TMA"),
    retired("copy_box", "tma_load"),
    retired("store_box", "tma_store"),
    retired("BoxRing", "TmaRing"),
    retired("BoxLoader", "TmaLoader"),
    retired("KeyBoxes", "KvTensorMaps"),
    retired("box_octets", "box_row_groups"),
    retired("SwizzledPanel", "SwizzleAtom"),
    retired("*panel_distance*", "stride between swizzle atoms"),
    retired("octet", "8-row core matrix"),
    retired("octets", "8-row core matrices"),
    retired("FetchedPanel", "LoadedValueBlock"),
    retired("tile_descriptor", "matrix_descriptor"),
    retired("products_wait", "wgmma_wait_group"),
    retired("products_commit", "wgmma_commit_group"),
    retired("products_fence", "wgmma_fence"),
    retired("XA_PRODUCT*", "XA_WGMMA"),
    retired("give_up_registers", "warpgroup_reg_dealloc"),
    retired("take_registers", "warpgroup_reg_alloc"),
    retired("fence_stores_for_async", "fence_proxy_async_shared"),
    retired("stores_done", "bulk_wait_group"),
    retired("stores_read", "bulk_wait_group_read"),
    retired("barrier_expect", "arrive_expect_tx"),
    retired("wait_for_reuse", "producer_wait"),
    retired("plan_turn", "PipelineState"),
    retired("TilePlan", "WorkTile"),
    // Softmax and numbers.
    retired("score_form", "logits_transform"),
    retired("ScoreForm", "LogitsTransform"),
    retired("score_plain", "logits_none"),
    retired("score_modified", "logits_softcap_alibi"),
    retired("modifies_scores", "transforms_logits"),
    retired("seen_begin", "visible_begin"),
    retired("seen_end", "visible_end"),
    retired("seers", "queries that attend to a key"),
    retired("*granule*", "tokens per load"),
    retired("spoiled", "nonfinite"),
    retired("CodeTable", "Fp8Table"),
    retired("CodeFormat", "Fp8Encoding"),
    retired("PairTable", "Fp8ToBf16Table"),
    retired("load_code_pairs", "load_fp8_pairs"),
    retired("Vectorised", "SimdKernel"),
    retired("Edits", "mask and bias"),
    retired("Ahead", "prefetcher"),
    retired("Weigh", "rescale"),
    retired("FewRows", "gemv"),
    retired("ManyRows", "gemm"),
    // Layers of the library.
    retired("carry_out", "execute"),
    retired("bring_over", "copy_to_host"),
    retired("take_over", "fuse_update"),
    retired("look_over", "validate_metadata"),
    retired("stand_before", "wrap; the C function xa_stand_before_pjrt_plugin is public and keeps its name"),
    retired("Door", "entry point"),
    retired("strike", "trigger"),
    retired("planted_faults", "failpoints"),
    retired("xa_takes_fault", "xa_take_failpoint"),
    retired("TakesFault", "failpoint"),
    // Python.
    retired("_fold", "_batching"),
    retired("_partition", "_sharding"),
    retired("*unfolded*", "without the batch dimension"),
    retired("_describe", "_lower"),
    retired("told_on", "reported"),
    // Tests.
    retired("IfWrong", "InvalidMetadata"),
    retired("RowAnswer", "AttentionRow"),
    retired("PlacedMemory", "BufferMemory"),
    retired("is_said", "is_specified"),
    retired("with_form", "with_config"),
    retired("check_named", "assert_named_matches_reference"),
    retired("check_against", "compare_with_reference"),
    retired("as_they_are", "unchanged"),
    retired("brimful", "full_case"),
    retired("askew", "misaligned"),
    retired("nobodys", "padding rows"),
    retired("cuda_faults", "cuda_driver_errors"),
    retired("faulty_libcuda", "fake_libcuda"),
    retired("stand_in", "fake_libcuda"),
    retired("run_spread", "run_strided"),
    retired("right_calls", "valid_calls"),
    retired("laws", "metamorphic properties"),
    retired("stand-in", "fake, emulated"),
    retired("damaged call*", "mutated call"),
    // Other identifiers of kernels, the CPU backend and Python.
    retired("TileFinder", "TileScheduler"),
    retired("TileNumbers", "TileScheduler"),
    retired("BoxDecodeLoop", "TMA decode loop"),
    retired("FetchedBlock", "loaded block"),
    retired("leave_no_cut", "store no partial"),
    retired("find_sections", "find head groups (L2 head swizzle)"),
    retired("next_tile_place", "tile index"),
    retired("has_risen", "rescale condition"),
    retired("ShareNumber", "WorkRangeIndex"),
    retired("CutBeginning", "StartSplit"),
    retired("decode_share", "work range"),
    retired("decode_shares", "work ranges"),
    retired("next_piece", "next work tile"),
    retired("attend_piece", "work tile"),
    retired("deliver", "store_output"),
    retired("GranuleSlots", "tokens per load"),
    retired("kLooksAhead", "prefetch"),
    retired("look_between", "sequence search"),
    retired("CachePlace", "CacheRow"),
    retired("QueryPlace", "query row"),
    retired("FoldedRows", "merged rows"),
    retired("score_capped", "logits_softcap"),
    retired("score_biased", "logits_alibi"),
    retired("weights_plain", "probabilities"),
    retired("weights_modified", "probabilities"),
    retired("OwnWeights", "RegisterOperand"),
    retired("SharedWeights", "SharedOperand"),
    retired("weigh_as", "mask"),
    retired("let_others_run", "yield"),
    retired("PER_WORD", "ELEMENTS_PER_LANE"),
    retired("dot_words", "dot products of lanes"),
    retired("scale_words", "scale_lanes"),
    retired("CodePairs", "the loader of fp8 pairs"),
    retired("SingleCodes", "the loader of fp8 elements"),
    retired("EditScores", "mask and bias"),
    retired("WORTH_SHARING", "say what the threshold is"),
    retired("register_tile", "micro-kernel"),
    retired("parallel_for_with", "parallel_for"),
    retired("gradient_refusal", "gradient error"),
    retired("in_two_processes", "parallel_pytest"),
    retired("jax_side", "jax_adapter"),
    retired("torch_side", "torch_adapter"),
    retired("withdraw_traits", "clear_traits"),
    retired("total_lent", "allocated pages"),
    retired("untold_lengths", "missing lengths"),
    retired("is_foldable", "batching rule"),
    // Words that cold reads of 2026-11-22 stopped at.
    retired("kPanel*", "kAtomColumns"),
    retired("kQueryPanel*", "kQueryAtomColumns"),
    retired("key_panels", "atom columns"),
    retired("value_panels", "atom columns"),
    retired("RingPosition", "RingPipelineState"),
    retired("turn_number", "PipelineState"),
    retired("kTurnBytes", "PipelineState"),
    retired("sections_", "head groups"),
    retired("most_tiles", "max_tiles"),
    retired("fills_steps", "say what the threshold is"),
    retired("ModifiedWeights", "P and dS, LogitsTransform"),
    retired("modified_weights", "logits_transform"),
    retired("wide_keys", "wide_dkdv"),
    retired("wide_queries", "wide_dq"),
    retired("kShareOffset", "kWorkRangeOffset"),
    retired("MOST_SHARES", "MAX_RANGES"),
    retired("first_unit", "first_chunk"),
    retired("units_before_", "chunks_before_"),
    retired("kTakesNewTokens", "kAppendsKv"),
    retired("kFetchesBoxes", "kLoadsByTma"),
    retired("stores_boxes", "stores_by_tma"),
    retired("clear_unseen", "clear_invisible_values"),
    retired("SlotParams", "SlotMapping"),
    retired("XA_SCORE", "XA_LOGITS"),
    retired("kFours", "say what the vectors are"),
    retired("scan_on", "continue_scan"),
    retired("kMost*", "kMax"),
    retired("folded_*", "merged into the batch"),
    retired("complaint", "problem, error"),
    retired("complaints", "problems, errors"),
    retired("contender*", "peers"),
    retired("refuse_dropout", "reject_dropout"),
    retired("length_advice", "length_hint"),
    retired("of_largest", "relative_to_largest"),
    retired("make_wild", "hostile"),
    retired("right call", "valid call"),
    retired("queries see", "attend to"),
    retired("query sees", "attends to"),
    retired("row sees", "attends to"),
    retired("rows see", "attend to"),
    retired("tile sees", "attends to"),
    retired("see no key", "attend to no key"),
    retired("sees no key", "attends to no key"),
    retired("wanted size", "recommended size"),
    retired("process of its own", "separate process"),
    retired("kernel of its own", "separate kernel"),
    retired("so many bytes", "this many bytes"),
    // Phrases.
    retired("by being made", "say by what"),
    retired("nobody", "say what does not"),
    retired("whoever", "the caller, or what it is"),
    retired("everybody", "all, and what"),
    retired("quick path", "fast path"),
    retired("nobody's", "say what it belongs to"),
    retired("somebody", "say who"),
    retired("unowned rows", "padding rows"),
];

/// Records of the past, which keep its words, and this table.
const NOT_SEARCHED: [&str; 3] = ["CHANGELOG.md", "docs/dev/lab_notebook.md", file!()];

/// A word of a text.
struct Word<'a> {
    text: &'a str,
    lower: String,
    line: usize,
    /// Only white space and comment markers separate it from the word before.
    continues: bool,
}

/// The words of a text: letters, digits, `_`, and `-` and `'` between them.
fn words(text: &str) -> Vec<Word<'_>> {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut words: Vec<Word> = Vec::new();
    let (mut line, mut continues, mut at) = (1, true, 0);
    while let Some(c) = text[at..].chars().next() {
        if part_of_word(c) {
            let rest = &text[at..];
            let mut end = 0;
            while let Some(more) = rest[end..].find(|c| !part_of_word(c)).or(Some(rest.len() - end)) {
                end += more;
                let joined = rest[end..].strip_prefix(['-', '\'']);
                if more == 0 || !joined.is_some_and(|after| after.starts_with(part_of_word)) {
                    break;
                }
                end += 1;
            }
            words.push(Word { text: &rest[..end], lower: rest[..end].to_lowercase(), line, continues });
            (at, continues) = (at + end, true);
        } else {
            line += usize::from(c == '\n');
            continues &= c.is_whitespace() || "/!#*>|".contains(c);
            at += c.len_utf8();
        }
    }
    words
}

/// Whether `word` is what one word of a pattern stands for.
fn is_word(pattern: &str, word: &Word) -> bool {
    let word = if pattern.contains(char::is_uppercase) { word.text } else { &*word.lower };
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (None, None) => word == pattern,
        (Some(end), None) => word.ends_with(end),
        (None, Some(start)) => word.starts_with(start),
        (Some(_), Some(_)) => word.contains(pattern.trim_matches('*')),
    }
}

/// The lines on which a pattern begins.
fn lines_with(pattern: &str, words: &[Word]) -> Vec<usize> {
    let pattern: Vec<&str> = pattern.split(' ').collect();
    let matches = |phrase: &&[Word]| {
        let same = pattern.iter().zip(*phrase).all(|(pattern, word)| is_word(pattern, word));
        same && phrase[1..].iter().all(|word| word.continues)
    };
    words.windows(pattern.len()).filter(matches).map(|phrase| phrase[0].line).collect()
}

/// Every text of the repository with its path from the root; without what is built, installed or downloaded.
fn texts() -> impl Iterator<Item = (String, String)> {
    let built = ["target", "dist"];
    let own = move |name: &str| name == ".ci" || !(name.starts_with('.') || built.contains(&name));
    let entries = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap());
    let own = entries.filter(move |entry| own(entry.file_name().to_str().unwrap()));
    let all = own.flat_map(|entry| match entry.path() {
        folder if folder.is_dir() => files(&folder),
        file => fs::read_to_string(&file).map(|text| (file, text)).into_iter().collect(),
    });
    let relative = all.map(|(path, text)| (path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned(), text));
    relative.filter(|(path, _)| !NOT_SEARCHED.contains(&path.as_str()))
}

#[test]
fn no_retired_word_is_used() {
    let (mut searched, mut uses) = (0, Vec::new());
    for (path, text) in texts() {
        searched += 1;
        let (words, lower) = (words(&text), text.to_lowercase());
        for Retired { pattern, instead, stays_in } in RETIRED {
            // Most files do not contain the first word, which this finds out fast.
            let first = pattern.split(' ').next().unwrap().trim_matches('*').to_lowercase();
            if !lower.contains(&first) || stays_in.iter().any(|(stays, _)| path.starts_with(stays)) {
                continue;
            }
            let lines = lines_with(pattern, &words);
            uses.extend(lines.iter().map(|line| format!("{path}:{line}: {pattern:?}, use: {instead}")));
        }
    }
    assert!(searched > 400, "{searched} files: the search misses most of the repository");
    assert!(uses.is_empty(), "{} retired words:\n{}", uses.len(), uses.join("\n"));
}

#[test]
fn a_pattern_matches_whole_words_across_the_lines_of_a_comment() {
    let text =
        "// The copy\n/// engine's Copy\n  // Engine. copy, engine copy-engine unit_copy, co-copy\nmerge_parts2, it's";
    let words = words(text);
    let all: Vec<&str> = words.iter().map(|word| word.text).collect();
    let end = ["copy-engine", "unit_copy", "co-copy", "merge_parts2", "it's"];
    assert_eq!(all, [&["The", "copy", "engine's", "Copy", "Engine", "copy", "engine"][..], &end].concat());
    for (pattern, lines) in [
        ("copy engine", &[2][..]),
        ("copy engine*", &[1, 2]),
        ("Copy", &[2]),
        ("copy", &[1, 2, 3]),
        ("*copy", &[1, 2, 3, 3, 3]),
        ("copy-engine", &[3]),
        ("merge_part*", &[4]),
        ("*parts*", &[4]),
        ("merge_parts", &[]),
        ("the copy", &[1]),
    ] {
        assert_eq!(lines_with(pattern, &words), lines, "{pattern}");
    }
}
