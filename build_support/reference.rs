//! Writes the reference pages of the operators to `OUT_DIR`; they are also checked in, in `docs/reference`.

use crate::operators::{Attribute, Operator, Tensor};
use anyhow::Result;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Writes every page.
pub(crate) fn build(operators: &[Operator], out: &Path) -> Result<()> {
    fs::write(out.join("custom_calls.md"), custom_calls(operators))?;
    Ok(fs::write(out.join("options.md"), options(operators))?)
}

/// `docs/reference/custom_calls.md`: operands, results and attributes of every target.
fn custom_calls(operators: &[Operator]) -> String {
    let mut text = String::from(
        "# Reference of the custom calls\n\n<!-- Generated from ffi/operators.toml; `make reference` writes it anew. -->\n\n\
         The operands, results and attributes of each target, in order. [semantics.md](../semantics.md) defines what it \
         computes,\n[ffi.md](../ffi.md) how it is called.\n\n\
         Dimensions: `T`, `Tq`, `Tk` rows; `S`, `B` sequences; `M` pages of a row of the block table; `P` pages; `Hq` \
         and `Hkv`\nheads, the second divides the first; `D` and `Dv` head dimensions, multiples of 8 up to 512. Q \
         stands for f16, bf16, f32\nor f8e4m3fn; KV for the dtype of q, and also f8e4m3fn or f8e5m2 under f16 and \
         bf16, and f8e4m3fn under f8e4m3fn.\n",
    );
    for operator in operators {
        let _ = write!(text, "\n## `{}`\n\n{}\n\n", operator.target, operator.summary);
        if let Some(name) = &operator.also_registered_as {
            let _ = write!(text, "Also registered as `{name}`.\n\n");
        }
        text += "| | type | |\n| --- | --- | --- |\n";
        for (kind, tensors) in [("operand", &operator.operands), ("result", &operator.results)] {
            for tensor in tensors {
                let optional = if tensor.optional { "optional " } else { "" };
                let aliased = tensor
                    .aliases
                    .as_ref()
                    .and_then(|name| operator.operands.iter().position(|operand| operand.name == *name));
                let aliases = aliased.map_or_else(String::new, |index| format!("; aliases operand {index}"));
                let Tensor { name, type_, doc, .. } = tensor;
                let _ = writeln!(text, "| {optional}{kind} `{name}` | {type_}{aliases} | {doc} |");
            }
        }
        for Attribute { name, kind, doc, none } in &operator.attributes {
            let none = match none {
                None => String::new(),
                Some(toml::Value::Boolean(none)) => format!(", {none} for none"),
                Some(toml::Value::Integer(none)) => format!(", {none} for none"),
                Some(none) => format!(", {} for none", none.as_float().unwrap_or_default()),
            };
            let _ = writeln!(text, "| attribute `{name}` | {}{none} | {doc} |", kind.names().0);
        }
    }
    text
}

/// `docs/reference/options.md`: which options and dtypes each attention operator has.
fn options(operators: &[Operator]) -> String {
    let is_scale = |attribute: &Attribute| ["scale", "softmax_scale"].contains(&attribute.name.as_str());
    let attention: Vec<&Operator> =
        operators.iter().filter(|operator| operator.attributes.iter().any(is_scale)).collect();
    let mut text = String::from(
        "# Options and dtypes\n\n<!-- Generated from ffi/operators.toml; `make reference` writes it anew. -->\n\n\
         ## Options of the attention operators\n\n\
         Every option works with every dtype of its operator, on the CPU and on CUDA, together with every other option, \
         but for\n`bias`, which neither pages nor 8-bit types nor `k_start` and `k_end` go with. The column of\n`flash_attn_varlen_bwd` shows what the gradients of `flash_attn_varlen` and `dot_product_attention` \
         support. A page per kernel in\n[the kernels](../dev/kernels/README.md) says which calls the tuned kernels compute.\n\n",
    );
    let names: Vec<String> = attention.iter().map(|operator| format!("`{}`", operator.name)).collect();
    let _ = write!(text, "| option | {} | |\n|---|{}---|\n", names.join(" | "), "---|".repeat(names.len()));
    // By name: what the option does, and the operators that have it.
    let mut rows: BTreeMap<&str, (&str, Vec<&str>)> = BTreeMap::new();
    for operator in &attention {
        let optional = operator.operands.iter().filter(|operand| operand.optional);
        let tensors = optional.map(|operand| (operand.name.as_str(), operand.doc.as_str()));
        let attributes = operator.attributes.iter().map(|attribute| (attribute.name.as_str(), attribute.doc.as_str()));
        for (name, doc) in tensors.chain(attributes) {
            rows.entry(name).or_insert((doc, vec![])).1.push(&operator.name);
        }
    }
    for (name, (doc, of)) in rows {
        let cells: Vec<&str> =
            attention.iter().map(|operator| if of.contains(&operator.name.as_str()) { "yes" } else { "–" }).collect();
        let _ = writeln!(text, "| `{name}` | {} | {doc} |", cells.join(" | "));
    }
    text += "\n## Dtypes\n\nThe same on the CPU and on CUDA. Q stands for f16, bf16, f32 or f8e4m3fn; KV for the dtype of q, and also \
             f8e4m3fn or f8e5m2\nunder f16 and bf16, and f8e4m3fn under f8e4m3fn.\n\n\
             | operator | operands | results |\n|---|---|---|\n";
    for operator in operators {
        let of = |tensors: &[Tensor]| {
            let floats = tensors.iter().filter(|tensor| !tensor.optional && !tensor.type_.starts_with("`i32"));
            let types: Vec<String> = floats.map(|tensor| format!("`{}`: {}", tensor.name, tensor.type_)).collect();
            types.join("; ")
        };
        let _ = writeln!(text, "| `{}` | {} | {} |", operator.name, of(&operator.operands), of(&operator.results));
    }
    text
}
