//! What is wrong in `ffi/operators.toml` stops the build, with the operator and what was expected.

#[allow(dead_code, reason = "what the build script writes is not looked at here")]
#[path = "../../build_support/operators.rs"]
mod operators;

const DECLARED: &str = include_str!("../../ffi/operators.toml");

/// The error of the declaration with `from` replaced by `to`.
fn refusal(from: &str, to: &str) -> String {
    assert!(DECLARED.contains(from), "{from}");
    format!("{:#}", operators::parse(&DECLARED.replacen(from, to, 1)).err().unwrap())
}

#[test]
fn the_declaration_itself_is_right() {
    operators::parse(DECLARED).unwrap();
}

#[test]
fn mistakes_are_named_with_what_was_expected() {
    for (from, to, said) in [
        ("number = 3", "number = 4", "operator kv_cache_update_split: number 4, expected 3: numbers are never reused"),
        (
            "name = \"paged_attention\"",
            "name = \"PagedAttention\"",
            "operator 1: name \"PagedAttention\", expected snake_case",
        ),
        (
            "optional_operands = [\"k_scale\", \"v_scale\"]",
            "optional_operands = [\"k_scale\", \"k_scale\"]",
            "operator kv_cache_update: a name stands twice in operands",
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
    ] {
        let found = refusal(from, to);
        assert!(found.contains(said), "{from} to {to}: {found}");
    }
}
