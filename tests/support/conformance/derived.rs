//! Cases that follow from an interface: wrong counts; attributes that are missing, superfluous, misnamed or of another
//! type; and, from `[expects]` of a table, buffers of other dtypes, ranks and sizes and attributes with other values.
//! The texts are those of XLA's header for what it counts and decodes, and those of the library otherwise.

use super::{Change, File, INVALID_ARGUMENT, Refusal};
use std::collections::BTreeMap;

pub(super) fn derived(file: &File) -> Vec<Change> {
    let operands = (file.operands.len(), file.optional_operands.len());
    let results = (file.results.len(), file.optional_results.len());
    let mut all = counts(file, "operand", "arguments", operands, |change, count| change.operand_count = Some(count));
    all.extend(counts(file, "result", "results", results, |change, count| change.result_count = Some(count)));
    all.extend(attributes(file));
    all.extend(file.expects.iter().flat_map(|(subject, expected)| match expected.split_once(": ") {
        Some((expected, values)) => other_values(file, subject, expected, values),
        None => other_buffers(file, subject, expected),
    }));
    all
}

fn refused(name: String, text: String) -> Change {
    Change { name, refusal: Some(Refusal { code: INVALID_ARGUMENT, text }), ..Change::default() }
}

fn counts(
    file: &File,
    kind: &str,
    in_header: &str,
    (required, optional): (usize, usize),
    set: impl Fn(&mut Change, usize),
) -> Vec<Change> {
    let max_count = required + optional;
    let with = |mut change: Change, count: usize| {
        set(&mut change, count);
        change
    };
    // The header counts one for all remaining buffers, and none for optional ones.
    let min_count = required as i64 - 1 - optional as i64;
    let too_few = (0..required).map(|count| {
        let text = format!("Wrong number of {in_header}: expected at least {min_count} but got {count}");
        with(refused(format!("{count} {kind}s"), text), count)
    });
    let without_elements = (required + 1..=max_count).map(|count| {
        let name = format!("{count} {kind}s, the optional ones without an element");
        with(Change { name, ..Change::default() }, count)
    });
    let too_many = [1, 3].map(|surplus| {
        let count = max_count + surplus;
        let text = format!("{}: {count} {kind}s given, at most {max_count} expected", file.names[0]);
        with(refused(format!("{surplus} {kind}s too many"), text), count)
    });
    too_few.chain(without_elements).chain(too_many).collect()
}

/// Calls whose attributes have a wrong count, name or type.
fn attributes(file: &File) -> Vec<Change> {
    let names: Vec<&str> = file.attributes.keys().map(String::as_str).collect();
    let parts = [&file.operands, &file.optional_operands, &file.results, &file.optional_results];
    // The header decodes the thread pool, all buffers and both lists of remaining buffers before the attributes.
    let before = 1 + parts.iter().map(|part| part.len()).sum::<usize>() + 2;
    let of = |name: String, values: &[(&str, &str)], text: String| Change {
        attributes: values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        ..refused(name, text)
    };
    let wrong_number = |names_given: &[&str]| {
        let named =
            if names_given.is_empty() { String::new() } else { format!(" with name(s): {}", names_given.join(", ")) };
        format!("Wrong number of attributes: expected {} but got {}{named}", names.len(), names_given.len())
    };
    let undecoded = |index: usize, why: String| {
        let place = before + index;
        format!("[execute] Failed to decode all FFI handler operands (bad operands at: {place})\nDiagnostics:\n{why}")
    };
    if names.is_empty() {
        let text = format!("{}: 1 attributes given, at most 0 expected", file.names[0]);
        return vec![of("an attribute too many".into(), &[("zeal", "i64 1")], text)];
    }
    let one_more = [names.as_slice(), &["zeal"]].concat();
    let mut all = vec![of("an attribute too many".into(), &[("zeal", "i64 1")], wrong_number(&one_more))];
    for (index, &name) in names.iter().enumerate() {
        let others: Vec<&str> = names.iter().filter(|other| **other != name).copied().collect();
        all.push(of(format!("{name} is missing"), &[(name, "absent")], wrong_number(&others)));
        let value = file.attributes[name].as_str();
        let (expected_type, scalars) = match value.split(' ').next().unwrap() {
            "i1" => ("PRED", [("i32 0", "S32"), ("i64 1", "S64")]),
            "i64" => ("S64", [("i32 1", "S32"), ("f32 1", "F32")]),
            _ => ("F32", [("i64 1", "S64"), ("f64 0.5", "F64")]),
        };
        let scalars =
            scalars.map(|(value, got)| (value, format!("scalar data type: expected {expected_type} but got {got}")));
        let others = [("text 1", "string"), ("i64s 1 2", "array")]
            .map(|(value, got)| (value, format!("attribute type: expected scalar but got {got}")));
        for (value, wrong) in scalars.into_iter().chain(others) {
            let text = undecoded(index, format!("Wrong {wrong}"));
            all.push(of(format!("{name} is {value}"), &[(name, value)], text));
        }
        if index + 1 == names.len() {
            let misnamed = format!("{name}z");
            let text = undecoded(index, format!("Attribute name mismatch: {misnamed} vs {name}"));
            all.push(of(format!("{name} is called {misnamed}"), &[(name, "absent"), (&misnamed, value)], text));
            let absent: Vec<_> = names.iter().map(|name| (*name, "absent")).collect();
            all.push(of("no attribute".into(), &absent, wrong_number(&[])));
        }
    }
    // With a single attribute, "no attribute" is the same call as "it is missing".
    all.retain(|change| names.len() > 1 || change.name != "no attribute");
    all
}

/// Calls with each of the invalid values that the table names.
fn other_values(file: &File, name: &str, expected: &str, values: &str) -> Vec<Change> {
    let kind = file.attributes[name].split(' ').next().unwrap();
    let of = |value: &str| Change {
        attributes: BTreeMap::from([(name.to_owned(), format!("{kind} {value}"))]),
        ..refused(
            format!("{name} {kind} {value}"),
            format!("{}: {name} is {value}, expected {expected}", file.names[0]),
        )
    };
    values.split(' ').map(of).collect()
}

/// Calls with other dtypes of a buffer, if the table has the expected ones, and with every similar shape that is
/// invalid.
fn other_buffers(file: &File, subject: &str, expected: &str) -> Vec<Change> {
    let name = subject.strip_prefix("result ").unwrap_or(subject);
    let named = |list: &[String]| list.iter().find_map(|b| b.strip_prefix(&format!("{name} ")).map(ToOwned::to_owned));
    let operand = named(&file.operands)
        .map(|declared| (declared, false))
        .or(named(&file.optional_operands).map(|declared| (declared, true)));
    let result = || {
        named(&file.results)
            .map(|declared| (declared, false))
            .or(named(&file.optional_results).map(|declared| (declared, true)))
    };
    let is_operand = operand.is_some() && name == subject;
    let (declared, optional) = if is_operand { operand } else { result() }.expect(subject);
    let (dtype, dims) = declared.split(']').next().unwrap().split_once('[').unwrap();
    let dims: Vec<i64> = dims.split(',').filter(|n| !n.is_empty()).map(|n| n.parse().unwrap()).collect();
    let shapes = expected.find("the ").or(expected.find('[')).map_or("", |at| &expected[at..]);
    let dtypes = expected[..expected.len() - shapes.len()].trim_end();
    let shapes: Vec<&str> = shapes.split(" then ").collect();
    let of = |dtype: &str, dims: &[i64], problem: String| {
        let sizes = dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let (mut operands, mut results) = (BTreeMap::new(), BTreeMap::new());
        let list = if is_operand { &mut operands } else { &mut results };
        list.insert(name.to_owned(), format!("{dtype}[{sizes}]"));
        let text = format!("{}: {subject} has {problem}", file.names[0]);
        Change { operands, results, ..refused(format!("{subject} {dtype}[{sizes}]"), text) }
    };
    let other_dtypes = if dtype.contains('f') { "bf16 f16 f64 f8e4m3fn f32" } else { "i64 u32 f32 i8" };
    let other_dtypes = other_dtypes
        .split(' ')
        .filter(|other| !dtypes.is_empty() && dtypes.split(" or ").all(|d| d != *other))
        .take(3)
        .map(|other| of(other, &dims, format!("dtype {other}, expected {dtypes}")));
    let other_shapes = near(&dims).into_iter().filter(|dims| !optional || *dims != [0]).filter_map(|dims| {
        let expected = shapes.iter().find(|shapes| !fits(&dims, shapes))?;
        Some(of(dtype, &dims, format!("shape {dims:?}, expected {expected}")))
    });
    other_dtypes.chain(other_shapes).collect()
}

/// Shapes of other ranks, some with as many elements; the sizes reversed; and shapes with one other size.
fn near(dims: &[i64]) -> Vec<Vec<i64>> {
    let (front, back) = dims.split_at(dims.len().saturating_sub(2));
    let merged = [front, &[back.iter().product()]].concat();
    let ranks = [[dims, &[1]].concat(), [&[1], dims].concat(), merged, vec![dims.iter().product()], vec![], vec![0]];
    let mut all = [ranks.as_slice(), &[dims.iter().rev().copied().collect()]].concat();
    all.extend(dims.split_last().map(|(_, rest)| rest.to_vec()));
    for (index, n) in dims.iter().enumerate() {
        for size in [n - 1, n + 1, n + 2, 2 * n] {
            let mut changed = dims.to_vec();
            changed[index] = size;
            all.push(changed);
        }
    }
    all.sort();
    all.dedup();
    all.retain(|near| near != dims);
    all
}

/// Whether a shape fits a text such as `[1] or [Hkv=2]` or `the shape of a, [2, 3]`: a size is a number, a name with
/// its number, or a name for any number.
fn fits(dims: &[i64], shapes: &str) -> bool {
    let is = |size: &str, n: i64| size.rsplit('=').next().unwrap().parse().map_or(true, |expected: i64| expected == n);
    shapes.is_empty()
        || shapes.split(" or ").any(|shape| {
            let (_, sizes) = shape.trim_end_matches(']').split_once('[').unwrap();
            let sizes: Vec<&str> = sizes.split(", ").filter(|s| !s.is_empty()).collect();
            sizes.len() == dims.len() && sizes.iter().zip(dims).all(|(size, n)| is(size, *n))
        })
}
