//! The debug check mode (`XLA_ATTENTION_CHECK=1`) reports metadata that is clamped otherwise, and wrong results.
//!
//! The library reads the variable once, so the ignored tests of this module run in a child process with the variable
//! set: through the CPU handlers, or with `XLA_ATTENTION_TEST_DEVICE=cuda` on a GPU.

use crate::support::valid_calls;
use crate::support::{
    ATTENTION_DTYPES, Array, AttentionCase, Attr, BF16, CPU, Frame, I32, INVALID_ARGUMENT, InlinePool, Invocation,
    MetadataRequest, Refusal, Side, handler_sets, i32s, named_paged_batches, request_metadata, runs_on_cpu,
};
use std::process::Command;
use xla_attention::Op;

fn in_check_mode() -> bool {
    std::env::var_os("XLA_ATTENTION_CHECK").is_some_and(|value| value == "1")
}

#[test]
fn all_tests_of_this_module_pass_in_debug_check_mode() {
    if in_check_mode() {
        return; // This is the child process.
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["check_mode::", "--include-ignored"]);
    let output = child.env("XLA_ATTENTION_CHECK", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(" 0 ignored"), "{text}");
}

/// Runs a call on the tested device. The buffers of a refused call are not compared.
fn run(call: &Invocation) -> Result<Vec<Array>, Refusal> {
    if runs_on_cpu() {
        call.outcome_in(Frame::new(call.target, CPU))
    } else {
        call.run(Side::EndsAtGuard, &InlinePool(4))
    }
}

fn assert_refused(call: &Invocation, text: &str) {
    let expected = Refusal { code: INVALID_ARGUMENT, text: format!("{}: XLA_ATTENTION_CHECK: {text}", call.target) };
    assert_eq!(run(call).unwrap_err(), expected);
}

#[test]
fn a_checked_handler_cannot_be_recorded() {
    for set in handler_sets() {
        for target in set.rows {
            for handler in [target.initialize, target.execute].into_iter().flatten() {
                let on_cuda = target.initialize.is_some();
                let metadata = request_metadata(handler, MetadataRequest::of(set.version)).unwrap();
                assert_eq!(metadata.command_buffer_compatible, on_cuda && !in_check_mode());
            }
        }
    }
}

/// T 6; 3 sequences of 2, 1 and 3 rows over 9, 16 and 3 keys in 5 pages of 8 tokens.
fn paged() -> Invocation {
    valid_calls::of("xla_gpu_paged_attention")
        .attribute("sliding_window", Attr::I64(-1))
        .with_operand("query_start_loc", i32s(&[0, 2, 3, 6]))
        .with_operand("context_lens", i32s(&[9, 16, 3]))
        .with_operand("block_tables", Array::i32s(&[3, 2], &[4, 0, 1, 2, 3, -7]))
        .with_operand("num_seqs", i32s(&[3]))
}

#[test]
#[ignore = "runs in debug check mode only"]
fn paged_metadata_is_refused_by_operand_entry_and_sequence() {
    run(&paged()).unwrap();
    // The operator does not read entries after the last key, or slots after the last sequence.
    run(&paged().with_operand("num_seqs", i32s(&[1])).with_operand("query_start_loc", i32s(&[0, 2, -9, 77]))).unwrap();
    let starts = |values: &[i32]| paged().with_operand("query_start_loc", i32s(values));
    let lengths = |values: &[i32]| paged().with_operand("context_lens", i32s(values));
    let table = |values: &[i32]| paged().with_operand("block_tables", Array::i32s(&[3, 2], values));
    for number in [-1, 4] {
        assert_refused(
            &paged().with_operand("num_seqs", i32s(&[number])),
            &format!("num_seqs is {number}, expected 0 to 3"),
        );
    }
    assert_refused(&starts(&[0, 4, 3, 6]), "query_start_loc[2] is 3 (sequence 1), less than query_start_loc[1], 4");
    assert_refused(&starts(&[-1, 2, 3, 6]), "query_start_loc[0] is -1 (sequence 0), expected 0 to 6 rows");
    assert_refused(&starts(&[0, 2, 3, 7]), "query_start_loc[3] is 7 (sequence 2), expected 0 to 6 rows");
    assert_refused(&lengths(&[9, -2, 3]), "context_lens[1] is -2 (sequence 1), expected a length");
    assert_refused(
        &lengths(&[9, 17, 3]),
        "context_lens[1] is 17 (sequence 1), expected 0 to 16: 2 entries of block_tables, over 5 pages of 8 tokens",
    );
    assert_refused(&table(&[4, 0, 1, 5, 3, 0]), "block_tables[1, 1] is 5 (sequence 1), expected a page, 0 to 4");
    assert_refused(&table(&[-1, 0, 1, 2, 3, 0]), "block_tables[0, 0] is -1 (sequence 0), expected a page, 0 to 4");
}

/// Tq 6, Tk 10; 3 sequences of 2, 1 and 3 rows over 4, 3 and 3 keys.
fn varlen(target: &'static str) -> Invocation {
    let call = valid_calls::of(target)
        .with_operand("k", Array::filled(BF16, &[10, 2, 16], 0))
        .with_operand("v", Array::filled(BF16, &[10, 2, 24], 0))
        .with_operand("cu_seqlens_q", i32s(&[0, 2, 3, 6]))
        .with_operand("cu_seqlens_k", i32s(&[0, 4, 7, 10]))
        .operand("seqused_k", i32s(&[4, 2, 9]));
    let has_pages = call.op() == Op::FlashAttnVarlen;
    let call = if has_pages { call.operand("block_table", Array::left_out(I32)) } else { call };
    call.operand("seqused_q", i32s(&[2, 0, 5])).operand("leftpad_k", i32s(&[0, 2, 1]))
}

#[test]
#[ignore = "runs in debug check mode only"]
fn varlen_metadata_is_refused_by_operand_entry_and_sequence() {
    refuses_varlen_metadata(&varlen("xla_gpu_flash_attn_varlen"));
    let mut gradients = varlen("xla_gpu_flash_attn_varlen_bwd");
    (gradients.results[1].dims[0], gradients.results[2].dims[0]) = (10, 10);
    refuses_varlen_metadata(&gradients);
}

fn refuses_varlen_metadata(valid_call: &Invocation) {
    run(valid_call).unwrap();
    let with = |name, values: &[i32]| valid_call.clone().with_operand(name, i32s(values));
    assert_refused(
        &with("cu_seqlens_q", &[3, 2, 3, 6]),
        "cu_seqlens_q[1] is 2 (sequence 0), less than cu_seqlens_q[0], 3",
    );
    assert_refused(&with("cu_seqlens_k", &[0, 4, 11, 10]), "cu_seqlens_k[2] is 11 (sequence 1), expected 0 to 10 rows");
    assert_refused(&with("seqused_k", &[4, 2, -1]), "seqused_k[2] is -1 (sequence 2), expected a length");
    assert_refused(&with("seqused_q", &[2, -5, 3]), "seqused_q[1] is -5 (sequence 1), expected a length");
    assert_refused(&with("leftpad_k", &[0, 3, 0]), "leftpad_k[1] is 3 (sequence 1), expected 0 to its 2 keys");
    assert_refused(&with("leftpad_k", &[-1, 0, 0]), "leftpad_k[0] is -1 (sequence 0), expected a length");
}

#[test]
#[ignore = "runs in debug check mode only"]
fn lengths_out_of_starts_are_refused_too() {
    let paged = |starts: &[i32], table: &[i32]| {
        let call = valid_calls::of("xla_gpu_flash_attn_varlen")
            .with_operand("cu_seqlens_q", i32s(&[0, 2, 3, 6]))
            .with_operand("k", Array::filled(BF16, &[5, 4, 2, 16], 0))
            .with_operand("v", Array::filled(BF16, &[5, 4, 2, 24], 0))
            .with_operand("cu_seqlens_k", i32s(starts));
        call.operand("seqused_k", Array::filled(I32, &[0], 0)).operand("block_table", Array::i32s(&[3, 2], table))
    };
    // Only the differences of starts matter over pages.
    run(&paged(&[-7, -3, 5, 6], &[0, -1, 1, 2, 3, -1])).unwrap();
    let text = "cu_seqlens_k[2] - cu_seqlens_k[1] is -4 (sequence 1), expected 0 to 8: 2 entries of block_table, over 5 \
                pages of 4 tokens";
    assert_refused(&paged(&[0, 8, 4, 4], &[0; 6]), text);
    assert_refused(
        &paged(&[0, 5, 6, 7], &[0, 9, 1, 1, 1, 1]),
        "block_table[0, 1] is 9 (sequence 0), expected a page, 0 to 4",
    );
}

#[test]
#[ignore = "runs in debug check mode only"]
fn slots_are_refused_by_entry() {
    let update =
        |slots: &[i32]| valid_calls::in_layout("xla_gpu_kv_cache_update", 1).with_operand("slot_mapping", i32s(slots));
    run(&update(&[39, 0, -1, 5, -1, 6])).unwrap();
    assert_refused(&update(&[0, 1, 40, 3, 4, 5]), "slot_mapping[2] is 40, expected a slot, 0 to 39, or -1 for none");
    assert_refused(&update(&[0, -2, 2, 3, 4, 5]), "slot_mapping[1] is -2, expected a slot, 0 to 39, or -1 for none");
    assert_refused(&update(&[7, 1, 2, 3, 7, 5]), "slot_mapping[4] is 7, as slot_mapping[0]");
    let slots = |values: &[i64]| {
        valid_calls::of("xla_gpu_kv_cache_update_split").with_operand("slot_mapping", Array::i64s(&[6], values))
    };
    run(&slots(&[0, 1, 2, 3, 4, 5])).unwrap();
    let text = "slot_mapping[5] is 4294967296, expected a slot, 0 to 39, or -1 for none";
    assert_refused(&slots(&[0, 1, 2, 3, 4, 1 << 32]), text);
}

#[test]
#[ignore = "runs in debug check mode only"]
fn tokens_that_cannot_be_gathered_are_refused_by_entry() {
    let gather = |pages: &[i32; 6], lens: &[i32]| {
        let tables = Array::i32s(&[3, 2], pages);
        valid_calls::of("xla_gpu_gather_kv_cache")
            .with_operand("block_tables", tables)
            .with_operand("context_lens", i32s(lens))
    };
    run(&gather(&[4, -1, -1, -1, 0, 1], &[8, 0, 16])).unwrap();
    let rest = "expected 0 to 16: 2 entries of block_tables, over 5 pages of 8 tokens";
    assert_refused(&gather(&[0; 6], &[3, -1, 0]), &format!("context_lens[1] is -1 (sequence 1), {rest}"));
    assert_refused(&gather(&[0; 6], &[17, 0, 0]), &format!("context_lens[0] is 17 (sequence 0), {rest}"));
    assert_refused(
        &gather(&[0, 0, 5, 0, 0, 0], &[1, 1, 1]),
        "block_tables[1, 0] is 5 (sequence 1), expected a page, 0 to 4",
    );
    assert_refused(&gather(&[0; 6], &[9, 9, 9]), "context_lens are 27 tokens, and the results have room for 24");
}

#[test]
#[ignore = "runs in debug check mode only"]
fn positions_are_refused_by_entry() {
    let rotate = |positions: &[i32]| {
        valid_calls::in_layout("xla_gpu_rope_kv_cache_update", 1)
            .with_operand("slot_mapping", i32s(&[0, 1, 2, -1, 4, 5]))
            .with_operand("positions", i32s(positions))
    };
    run(&rotate(&[0, 8, 3, -44, 1, 1])).unwrap();
    assert_refused(&rotate(&[0, 1, 9, 0, 0, 0]), "positions[2] is 9, expected 0 to 8, the rows of cos_sin");
    assert_refused(&rotate(&[0, 1, 2, 0, 0, -1]), "positions[5] is -1, expected 0 to 8, the rows of cos_sin");
}

/// Like [`paged`]. The new tokens of a sequence are its last keys.
fn paged_update() -> Invocation {
    let attention = paged();
    let operands = attention.operands.into_iter().take(6);
    let call = operands.fold(
        valid_calls::of("xla_gpu_paged_attention_update").attribute("sliding_window", Attr::I64(-1)),
        |call, (name, operand)| call.with_operand(name, operand),
    );
    call.with_operand("slot_mapping", i32s(&[39, 0, 23, 24, 25, 26]))
}

#[test]
#[ignore = "runs in debug check mode only"]
fn new_tokens_are_refused_by_entry_where_the_table_has_them_elsewhere() {
    run(&paged_update()).unwrap();
    let slots = |values: &[i32]| paged_update().with_operand("slot_mapping", i32s(values));
    // Only sequences below `num_seqs` have keys.
    run(&slots(&[39, 0, 23, -1, 4, -1]).with_operand("num_seqs", i32s(&[2]))).unwrap();
    let place = |row: usize, slot: i32, place: i32, key: usize, b: usize| {
        format!("slot_mapping[{row}] is {slot}, expected {place}, where block_tables has key {key} of sequence {b}")
    };
    assert_refused(&slots(&[38, 0, 23, 24, 25, 26]), &place(0, 38, 39, 7, 0));
    assert_refused(&slots(&[39, 0, 23, 24, 25, -1]), &place(5, -1, 26, 2, 2));
    assert_refused(&slots(&[39, 0, 23, 25, 24, 26]), &place(3, 25, 24, 0, 2));
    assert_refused(&slots(&[39, 0, 39, 24, 25, 26]), "slot_mapping[2] is 39, as slot_mapping[0]");
    let text = "slot_mapping[1] is 40, expected a slot, 0 to 39, or -1 for none";
    assert_refused(&slots(&[39, 40, 23, 24, 25, 26]), text);
    let table = paged_update().with_operand("block_tables", Array::i32s(&[3, 2], &[4, 0, 1, 5, 3, 0]));
    assert_refused(&table, "block_tables[1, 1] is 5 (sequence 1), expected a page, 0 to 4");
    // More rows than keys: the first row has no key.
    let lengths = slots(&[-1, 32, 23, 24, 25, 26]).with_operand("context_lens", i32s(&[1, 16, 3]));
    run(&lengths).unwrap();
}

/// Two sequences whose new tokens are their last keys, over latent rows.
fn latent_update() -> Invocation {
    let table = Array::i32s(&[3, 2], &[4, 0, 1, 3, 2, 0]);
    valid_calls::of("xla_gpu_mla_paged_attention_update")
        .with_operand("cu_seqlens_q", i32s(&[0, 2, 4, 6]))
        .with_operand("seqused_k", i32s(&[8, 12, 16]))
        .with_operand("block_table", table)
        .with_operand("slot_mapping", i32s(&[38, 39, 26, 27, 6, 7]))
}

#[test]
#[ignore = "runs in debug check mode only"]
fn metadata_of_latent_attention_is_refused_by_entry() {
    run(&latent_update()).unwrap();
    let slots = |values: &[i32]| latent_update().with_operand("slot_mapping", i32s(values));
    let text = "slot_mapping[0] is 37, expected 38, where block_table has key 6 of sequence 0";
    assert_refused(&slots(&[37, 39, 26, 27, 6, 7]), text);
    let table = latent_update().with_operand("block_table", Array::i32s(&[3, 2], &[4, 0, 1, 5, 2, 0]));
    assert_refused(&table, "block_table[1, 1] is 5 (sequence 1), expected a page, 0 to 4");
    let longer = latent_update().with_operand("seqused_k", i32s(&[8, 17, 16]));
    let text = "seqused_k[1] is 17 (sequence 1), expected 0 to 16: 2 entries of block_table, over 5 pages of 8 tokens";
    assert_refused(&longer, text);
    let starts = latent_update().with_operand("cu_seqlens_q", i32s(&[0, 2, 1, 6]));
    assert_refused(&starts, "cu_seqlens_q[2] is 1 (sequence 1), less than cu_seqlens_q[1], 2");
}

/// The operators whose results the mode recomputes on the CPU.
const ATTENTION: [Op; 5] = [
    Op::FlashAttnVarlen,
    Op::PagedAttention,
    Op::PagedAttentionUpdate,
    Op::MlaPagedAttention,
    Op::MlaPagedAttentionUpdate,
];

/// Calls with valid metadata and results other than 0: those of attention, and all others.
fn valid() -> [Vec<Invocation>; 2] {
    let named = ATTENTION_DTYPES.into_iter().flat_map(|dtype| named_paged_batches(dtype.into()));
    let named = named.map(|(_, spec, memory_layout)| AttentionCase::paged(&spec.batch(), &memory_layout).invocation());
    let attends = |call: &Invocation| ATTENTION.contains(&call.op());
    let (attention, others): (Vec<_>, Vec<_>) = valid_calls::with_numbers().into_iter().partition(attends);
    [named.chain(attention).collect(), others]
}

fn assert_succeeds(call: &Invocation) {
    run(call).unwrap_or_else(|refusal| panic!("{} {}: {refusal:?}", call.target, call.description));
}

#[test]
#[ignore = "runs in debug check mode only"]
fn valid_calls_pass() {
    valid().iter().flatten().for_each(assert_succeeds);
}

#[cfg(feature = "failpoints")]
mod wrong_results {
    use super::*;
    use crate::support::INTERNAL;
    use xla_attention::{Failpoint, arm};

    /// Asserts that one wrong number is reported, and that the next call succeeds.
    fn assert_reported(call: &Invocation) {
        arm(Failpoint::WrongResult);
        let refusal = run(call).unwrap_err();
        let result = &call.results[0];
        let begins = format!("{}: XLA_ATTENTION_CHECK: {}[", call.target, result.name);
        let ends = format!("; 1 of {} elements are off", result.dims.iter().product::<i64>());
        let has_text = refusal.text.starts_with(&begins) && refusal.text.ends_with(&ends);
        assert!(refusal.code == INTERNAL && has_text, "{} {}: {refusal:?}", call.target, call.description);
        assert_succeeds(call);
    }

    #[test]
    #[ignore = "runs in debug check mode only"]
    fn a_wrong_result_is_reported() {
        let [attention, others] = valid();
        attention.iter().for_each(assert_reported);
        // On the CPU, the mode recomputes the results of attention only.
        if !runs_on_cpu() {
            others.iter().filter(|call| !call.results[0].dims.contains(&0)).for_each(assert_reported);
        }
    }
}
