//! Mistakes in `ffi/operators.toml` and `kernels/variants.toml` stop the build with an error that names the entry and
//! what was expected.

#[allow(dead_code, reason = "what the build script writes is not looked at here")]
#[path = "../../build_support/operators.rs"]
mod operators;

#[allow(dead_code, reason = "what the build script writes is not looked at here")]
#[path = "../../build_support/variants.rs"]
mod variants;

const OPERATORS: &str = include_str!("../../ffi/operators.toml");
const VARIANTS: &str = include_str!("../../kernels/variants.toml");

/// Asserts that `parse` accepts `declared`, and for each mistake (`from`, `to`, `message`) refuses it with an error
/// that contains `message` if `from` is replaced by `to`.
fn refuses<T>(declared: &str, parse: impl Fn(&str) -> anyhow::Result<T>, mistakes: &[(&str, &str, &str)]) {
    parse(declared).map(|_| ()).unwrap();
    for (from, to, message) in mistakes {
        assert!(declared.contains(from), "{from}");
        let error = format!("{:#}", parse(&declared.replacen(from, to, 1)).err().unwrap());
        assert!(error.contains(message), "{from} to {to}: {error}");
    }
}

#[test]
fn mistakes_in_operators_are_reported_with_what_was_expected() {
    let mistakes = [
        ("number = 3", "number = 4", "operator kv_cache_update_split: number 4, expected 3: numbers are never reused"),
        (
            "name = \"paged_attention\"",
            "name = \"PagedAttention\"",
            "operator 1: name \"PagedAttention\", expected snake_case",
        ),
        (
            "optional_operands = [\"k_scale\", \"v_scale\"]",
            "optional_operands = [\"k_scale\", \"k_scale\"]",
            "operator kv_cache_update_split: a name stands twice in operands",
        ),
        (
            "operands = [\"query\", \"kv_cache\",",
            "operands = [\"qurey\", \"kv_cache\",",
            "operator paged_attention: operands: \"qurey\" is not declared; expected one of",
        ),
        (
            "[\"batch_invariant\", \"scale\",",
            "[\"scale\", \"batch_invariant\",",
            "operator paged_attention: attributes [\"scale\", \"batch_invariant\", \"sliding_window\", \"soft_cap\"], expected them \
             in alphabetical order",
        ),
        (
            "kind = \"i64\", none = -1",
            "kind = \"i64\", none = 0.5",
            "operator paged_attention: attribute sliding_window has none = Float(0.5), expected I64",
        ),
        (
            "aliases = \"kv_cache\"",
            "aliases = \"cache\"",
            "operator kv_cache_update: result kv_cache aliases \"cache\", expected an operand",
        ),
        ("kind = \"bool\"", "kind = \"i32\"", "unknown variant `i32`, expected one of `bool`, `i64`, `f32`"),
        ("results = [\"out\"]\n", "", "missing field `results`"),
    ];
    refuses(OPERATORS, operators::parse, &mistakes);
}

#[test]
fn mistakes_in_kernels_and_tiles_are_reported_with_what_was_expected() {
    let mistakes = [
        ("name = \"simple_add\"", "name = \"kv_cache_update\"", "kernel kv_cache_update: the name stands twice"),
        (
            "source = \"simple_add.cu\"",
            "source = \"add.cu\"",
            "kernel simple_add: source \"add.cu\", expected a file of kernels/",
        ),
        (
            "sass = [\"80\", \"90\", \"100\", \"120\"]",
            "sass = []",
            "kernel simple_add: sass = [], expected the architectures",
        ),
        (
            "target = \"80\"",
            "target = \"sm_80\"",
            "kernel simple_add: architecture \"sm_80\", expected one such as \"80\"",
        ),
        (
            "values = [\"f16\", \"bf16\", \"f32\", \"f64\"",
            "values = [\"f16\", \"f16\"",
            "axis dtype: a value stands twice",
        ),
        (
            "axes = [{ name = \"dtype\"",
            "axis = [{ name = \"dtype\"",
            "unknown field `axis`, expected one of `name`, `source`",
        ),
        (
            "{ shape = \"decode_8warps\", dtype = \"f32\" }",
            "{ form = \"decode_8warps\" }",
            "kernel attention: without: \"form\" is no axis of it",
        ),
        (
            "{ shape = \"decode_8warps\", dtype = \"f32\" }",
            "{ shape = \"broad\" }",
            "kernel attention: without: shape = \"broad\", expected one of [\"prefill\", \"decode\", \"decode_8warps\"]",
        ),
        (
            "tiles = [{ table = \"attention\" }]",
            "tiles = [{ table = \"atention\" }]",
            "kernel attention: tiles of Some(Name(\"atention\")), expected a table of [\"attention\", \"cluster_decode\"",
        ),
        (
            "tiles = [{ table = \"hopper_prefill\", bytes = 1 }]",
            "tiles = [{ table = \"hopper_prefill\" }]",
            "kernel hopper_prefill_fp8: tiles hopper_prefill: key bytes is neither an axis nor given beside the table",
        ),
        (
            "[\"decode_8warps\", 2, 128, 1, 8,",
            "[\"decode_8warps\", 2, 128, 8,",
            "tiles attention: row [Name(\"decode_8warps\"), Number(2), Number(128), Number(8), ",
        ),
        (
            "[\"decode_8warps\", 2, 128, 1, 8,",
            "[\"decode_8warps\", 2, 128, -1, 8,",
            "did not match any variant of untagged enum Entry",
        ),
        (
            "[\"decode_8warps\", 2, 128, 1, 8,",
            "[\"decode_8warps\", 2, 128, \"1\", 8,",
            "row_warps = 1, expected an entry such as 4",
        ),
        (
            "[\"decode_8warps\", 2, 128, 1, 8,",
            "[\"decode_8warps\", 2, 64, 1, 8,",
            "tiles attention: no row for attention_f16_128_decode_8warps_none, expected one that begins (shape, bytes, head_dim) = \
             [\"decode_8warps\", \"2\", \"128\"]",
        ),
        (
            "  [\"decode_8warps\", 2, 128, 1, 8,",
            "  [\"tall\", 2, 128, 1, 8, 1, 1, 16, 2, 1, true, false, 1],\n  [\"decode_8warps\", 2, 128, 1, 8,",
            "tiles attention: no kernel is built for row [Name(\"tall\")",
        ),
    ];
    refuses(VARIANTS, variants::parse, &mistakes);
}
