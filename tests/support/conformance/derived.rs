//! Cases that follow from an interface alone: counts, and attributes that are missing or of another type. The texts are
//! those of XLA's header, where it counts and decodes, and ours for a surplus. `tests/python/conformance_table.py` derives
//! the same.

use super::{Change, File};
use std::collections::BTreeMap;

pub(super) fn derived(file: &File) -> Vec<Change> {
    let operands = (file.operands.len(), file.optional_operands.len());
    let results = (file.results.len(), file.optional_results.len());
    let mut all = counts(file, "operand", "arguments", operands, |change, count| change.operand_count = Some(count));
    all.extend(counts(file, "result", "results", results, |change, count| change.result_count = Some(count)));
    // What the header decodes before the attributes: the thread pool, buffers, and those that remain of both kinds.
    let before = 1 + operands.0 + operands.1 + results.0 + results.1 + 2;
    all.extend(file.attributes.keys().enumerate().flat_map(|(index, name)| attribute(file, name, before + index)));
    all
}

fn counts(
    file: &File,
    what: &str,
    in_header: &str,
    (required, optional): (usize, usize),
    set: impl Fn(&mut Change, usize),
) -> Vec<Change> {
    let most = required + optional;
    let of = |name: String, count: usize, invalid: Option<String>| {
        let mut change = Change { name, invalid, ..Change::default() };
        set(&mut change, count);
        change
    };
    // The header counts one for all that remain and none for what is optional.
    let least = required as i64 - 1 - optional as i64;
    let too_few = (0..required).map(|count| {
        let text = format!("Wrong number of {in_header}: expected at least {least} but got {count}");
        of(format!("{count} {what}s"), count, Some(text))
    });
    let without_elements = (required + 1..=most)
        .map(|count| of(format!("{count} {what}s, the optional ones without an element"), count, None));
    let too_many = [1, 3].map(|surplus| {
        let count = most + surplus;
        let text = format!("{}: {count} {what}s given, at most {most} expected", file.names[0]);
        of(format!("{surplus} {what}s too many"), count, Some(text))
    });
    too_few.chain(without_elements).chain(too_many).collect()
}

/// The attribute, at this place of what is decoded, missing and of four other types.
fn attribute(file: &File, name: &str, place: usize) -> Vec<Change> {
    let of = |what: String, value: &str, text: String| Change {
        name: format!("{name} is {what}"),
        attributes: BTreeMap::from([(name.to_owned(), value.to_owned())]),
        invalid: Some(text),
        ..Change::default()
    };
    let others: Vec<_> = file.attributes.keys().filter(|other| *other != name).map(String::as_str).collect();
    let named = if others.is_empty() { String::new() } else { format!(" with name(s): {}", others.join(", ")) };
    let (expected, got) = (file.attributes.len(), others.len());
    let missing = format!("Wrong number of attributes: expected {expected} but got {got}{named}");
    let (right, scalars) = match file.attributes[name].split(' ').next().unwrap() {
        "i1" => ("PRED", [("i32 0", "S32"), ("i64 1", "S64")]),
        "i64" => ("S64", [("i32 1", "S32"), ("f32 1", "F32")]),
        _ => ("F32", [("i64 1", "S64"), ("f64 0.5", "F64")]),
    };
    let scalars = scalars.map(|(value, got)| (value, format!("scalar data type: expected {right} but got {got}")));
    let others = [("text 1", "string"), ("i64s 1 2", "array")]
        .map(|(value, got)| (value, format!("attribute type: expected scalar but got {got}")));
    let undecoded = |(value, wrong): (&'static str, String)| {
        let decoded = format!("[execute] Failed to decode all FFI handler operands (bad operands at: {place})");
        of(value.to_owned(), value, format!("{decoded}\nDiagnostics:\nWrong {wrong}"))
    };
    let mistyped = scalars.into_iter().chain(others).map(undecoded);
    [of("missing".into(), "absent", missing)].into_iter().chain(mistyped).collect()
}
