//! Reads the conformance tables (`tests/conformance/README.md`) as calls.

use super::{Array, Attr, Dtype, INVALID_ARGUMENT, Invocation, Refusal, UNIMPLEMENTED};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use toml::Value;

mod derived;

/// Included in the binary, which may run without the sources.
const TABLES: [&str; 12] = [
    include_str!("../../conformance/tables/flash_attn_varlen.toml"),
    include_str!("../../conformance/tables/flash_attn_varlen_bwd.toml"),
    include_str!("../../conformance/tables/gather_kv_cache.toml"),
    include_str!("../../conformance/tables/kv_cache_update.toml"),
    include_str!("../../conformance/tables/kv_cache_update_split.toml"),
    include_str!("../../conformance/tables/merge_attention_states.toml"),
    include_str!("../../conformance/tables/mla_paged_attention.toml"),
    include_str!("../../conformance/tables/mla_paged_attention_update.toml"),
    include_str!("../../conformance/tables/paged_attention.toml"),
    include_str!("../../conformance/tables/paged_attention_update.toml"),
    include_str!("../../conformance/tables/rope_kv_cache_update.toml"),
    include_str!("../../conformance/tables/simple_add.toml"),
];

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    names: Vec<String>,
    operands: Vec<String>,
    optional_operands: Vec<String>,
    results: Vec<String>,
    optional_results: Vec<String>,
    aliases: BTreeMap<String, String>,
    attributes: BTreeMap<String, String>,
    types: String,
    works: BTreeMap<String, Value>,
    expects: BTreeMap<String, String>,
    #[serde(rename = "INVALID_ARGUMENT")]
    invalid: BTreeMap<String, Value>,
    #[serde(rename = "UNIMPLEMENTED")]
    unimplemented: BTreeMap<String, Value>,
}

/// The lines of a part of a table. A list is one line per further element, whose words replace `{0}`, `{1}`, … on both
/// sides.
fn filled(part: &BTreeMap<String, Value>) -> impl Iterator<Item = (String, String)> {
    part.iter().flat_map(|(left, right)| {
        let right = right.as_array().cloned().unwrap_or_else(|| vec![right.clone(), Value::String(String::new())]);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let filled = |words: &Value| {
            let both = (left.to_owned(), text(&right[0]));
            text(words).split(' ').enumerate().fold(both, |(left, right), (i, word)| {
                let place = format!("{{{i}}}");
                (left.replace(&place, word), right.replace(&place, word))
            })
        };
        right[1..].iter().map(filled).collect::<Vec<_>>()
    })
}

/// The difference of a call from the valid one, and its expected outcome.
#[derive(Clone, Default)]
struct Change {
    name: String,
    operands: BTreeMap<String, String>,
    results: BTreeMap<String, String>,
    attributes: BTreeMap<String, String>,
    operand_count: Option<usize>,
    result_count: Option<usize>,
    memory: Option<usize>,
    refusal: Option<Refusal>,
}

/// A buffer in a table: `f32[2,3] 1 2` holds 1 2 1 2 1 2, without values zeros. A result of `any` is not compared.
#[derive(Clone, Debug)]
pub struct Typed {
    pub dtype: Dtype,
    pub dims: Vec<i64>,
    values: Vec<&'static str>,
}

impl Typed {
    fn new(text: &'static str) -> Self {
        let mut words = text.split(' ');
        let (element, sizes) = words.next().unwrap().strip_suffix(']').and_then(|t| t.split_once('[')).unwrap();
        let dtype =
            (1..=20).map(Dtype).find(|dtype| dtype.to_string() == element).or_else(|| element.parse().ok().map(Dtype));
        Self {
            dtype: dtype.unwrap_or_else(|| panic!("{text}: no such element type")),
            dims: sizes.split(',').filter(|s| !s.is_empty()).map(|s| s.parse().unwrap()).collect(),
            values: words.collect(),
        }
    }

    /// The buffer in a call that leaves it out.
    fn left_out(&self) -> Self {
        Self { dtype: self.dtype, dims: vec![0], values: vec![] }
    }

    fn array(&self) -> Array {
        if self.values.is_empty() {
            return Array::filled(self.dtype, &self.dims, 0);
        }
        let count = self.dims.iter().product::<i64>() as usize;
        let values = self.values.iter().map(|v| v.parse().unwrap()).cycle().take(count);
        Array::new(self.dtype, &self.dims, &values.collect::<Vec<f64>>())
    }

    /// Whether `actual` holds these values, within 1e-4 relatively.
    #[allow(clippy::float_cmp, reason = "infinities are equal to themselves only")]
    pub fn is_met_by(&self, actual: &Array) -> bool {
        if self.values == ["any"] {
            return true;
        }
        let near = |(expected, actual): (f64, f64)| {
            expected == actual || (expected.is_finite() && (expected - actual).abs() <= 1e-4 * expected.abs().max(1.0))
        };
        self.array().values().into_iter().zip(actual.values()).all(near)
    }
}

/// The interface that a table describes. Required buffers come before optional ones.
pub struct Interface {
    pub names: Vec<&'static str>,
    pub operands: Vec<(&'static str, Typed)>,
    pub required_operands: usize,
    pub results: Vec<(&'static str, Typed)>,
    pub required_results: usize,
    pub attributes: BTreeMap<&'static str, &'static str>,
}

/// A call and its expected outcome.
pub struct ConformanceCase {
    pub target: &'static str,
    pub name: &'static str,
    pub operands: Vec<(&'static str, Typed)>,
    pub results: Vec<(&'static str, Typed)>,
    pub attributes: Vec<(&'static str, Attr)>,
    /// (operand, result) pairs that may share memory.
    pub aliases: Vec<(usize, usize)>,
    /// The invalid address that all buffers have.
    pub memory: Option<usize>,
    pub refusal: Option<Refusal>,
    /// Whether counts, and names and types of attributes, are those of the target's signature.
    pub fits: bool,
}

pub struct Table {
    pub interface: Interface,
    pub cases: Vec<ConformanceCase>,
}

/// What a driver cannot express, and the least number of cases that it runs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Driver {
    pub at_least: usize,
    pub cannot_express: BTreeMap<String, String>,
}

/// All tables.
pub fn tables() -> &'static [Table] {
    static READ: LazyLock<Vec<Table>> = LazyLock::new(|| TABLES.iter().map(|text| read(text)).collect());
    &READ
}

pub fn cases() -> impl Iterator<Item = &'static ConformanceCase> {
    tables().iter().flat_map(|table| &table.cases)
}

pub fn driver(name: &str) -> Driver {
    let mut drivers: BTreeMap<String, Driver> = toml::from_str(include_str!("../../conformance/drivers.toml")).unwrap();
    drivers.remove(name).unwrap()
}

/// A table with the entries that it inherits by `like`.
fn with_inherited(text: &str) -> toml::Table {
    let mut table: toml::Table = toml::from_str(text).unwrap();
    let Some(like) = table.remove("like") else { return table };
    let mut others = TABLES.iter().map(|text| toml::from_str::<toml::Table>(text).unwrap());
    for (key, inherited) in others.find(|other| other["names"][0] == like).expect("a table of that name") {
        match (table.get_mut(&key), inherited) {
            (None, inherited) => drop(table.insert(key, inherited)),
            (Some(Value::Array(own)), Value::Array(inherited)) if key != "names" => drop(own.splice(..0, inherited)),
            (Some(Value::Table(own)), Value::Table(inherited)) => {
                for (name, value) in inherited {
                    own.entry(name).or_insert(value);
                }
            }
            _ => {}
        }
    }
    table
}

fn read(text: &str) -> Table {
    let file: File = with_inherited(text).try_into().unwrap();
    let interface = Interface {
        names: file.names.iter().map(|n| keep(n)).collect(),
        operands: named(&file.operands, &file.optional_operands),
        required_operands: file.operands.len(),
        results: named(&file.results, &file.optional_results),
        required_results: file.results.len(),
        attributes: file.attributes.iter().map(|(name, value)| (keep(name), keep(value))).collect(),
    };
    let refused = |list: &BTreeMap<String, Value>, code| -> Vec<Change> {
        let text = |text: &str| format!("{}: {}", file.names[0], text.replace("{types}", &file.types));
        filled(list)
            .map(|(changes, text_of_refusal)| Change {
                refusal: Some(Refusal { code, text: text(&text_of_refusal) }),
                ..file.change(&changes, &changes)
            })
            .collect()
    };
    let mut all = vec![Change { name: "the valid call".into(), ..Change::default() }];
    all.extend(filled(&file.works).map(|(name, changes)| file.change(&name, &changes)));
    let optional = [("operand", &file.optional_operands), ("result", &file.optional_results)];
    let given = optional.into_iter().filter(|(_, list)| !list.is_empty());
    all.extend(given.map(|(part, list)| file.change(&format!("every optional {part}"), &list.join("; "))));
    all.extend(refused(&file.invalid, INVALID_ARGUMENT));
    all.extend(refused(&file.unimplemented, UNIMPLEMENTED));
    let names: BTreeSet<String> = all.iter().map(|change| change.name.clone()).collect();
    assert_eq!(names.len(), all.len(), "{}: two cases have one name", file.names[0]);
    all.extend(derived::derived(&file).into_iter().filter(|derived| !names.contains(&derived.name)));
    let cases_of = |name: &'static str| all.iter().map(move |c| (name, c));
    let named_cases: Vec<_> = interface.names.iter().flat_map(|name| cases_of(name)).collect();
    let cases = named_cases.into_iter().map(|(name, change)| case(&interface, &file.aliases, name, change)).collect();
    Table { interface, cases }
}

impl File {
    /// Parses `stacked pages: k bf16[10,2,16]; softcap f32 1`: changes to the working call of this name, or to the
    /// valid call.
    fn change(&self, name: &str, text: &str) -> Change {
        let (start, changes) = match text.split_once(": ") {
            Some((from, changes)) => {
                let (name, start) = filled(&self.works).find(|(name, _)| name == from).expect(from);
                (self.change(&name, &start), changes)
            }
            None => (Change::default(), text),
        };
        let mut all = Change { name: name.to_owned(), ..start };
        for change in changes.split("; ") {
            let (subject, value) = change.split_once(' ').unwrap();
            let is_operand =
                self.operands.iter().chain(&self.optional_operands).any(|o| o.split(' ').next() == Some(subject));
            match (subject, value) {
                ("memory", place) => {
                    let places = BTreeMap::from([("null", 0), ("nowhere", 64), ("odd", 0x1002)]);
                    all.memory = Some(places[place]);
                }
                (count, "operands") => all.operand_count = Some(count.parse().unwrap()),
                (count, "results") => all.result_count = Some(count.parse().unwrap()),
                ("result", value) => {
                    let (name, buffer) = value.split_once(' ').unwrap();
                    all.results.insert(name.to_owned(), buffer.to_owned());
                }
                _ => {
                    let list = match (value.contains('['), is_operand) {
                        (false, _) => &mut all.attributes,
                        (true, true) => &mut all.operands,
                        (true, false) => &mut all.results,
                    };
                    list.insert(subject.to_owned(), value.to_owned());
                }
            }
        }
        all
    }
}

/// Strings of the tables live as long as the process.
fn keep(text: &str) -> &'static str {
    text.to_owned().leak()
}

fn named(required: &[String], optional: &[String]) -> Vec<(&'static str, Typed)> {
    let entries = required.iter().chain(optional).map(|text| keep(text).split_once(' ').unwrap());
    entries.map(|(name, text)| (name, Typed::new(text))).collect()
}

/// Required buffers, and optional ones up to the last changed one; those before it are left out.
fn buffers(
    all: &[(&'static str, Typed)],
    required: usize,
    changes: &BTreeMap<String, String>,
    count: Option<usize>,
) -> Vec<(&'static str, Typed)> {
    assert!(changes.keys().all(|c| all.iter().any(|(name, _)| name == c)), "no such name: {changes:?}");
    let changed = |name: &str| changes.get(name).map(|text| Typed::new(keep(text)));
    let given = all.iter().rposition(|(name, _)| changes.contains_key(*name)).map_or(0, |last| last + 1).max(required);
    let mut list: Vec<_> = all
        .iter()
        .enumerate()
        .map(|(index, (name, declared))| {
            let unchanged = || if index < required { declared.clone() } else { declared.left_out() };
            (*name, changed(name).unwrap_or_else(unchanged))
        })
        .collect();
    let count = count.unwrap_or(given);
    while list.len() < count {
        list.push(("surplus", Typed::new("f32[0]")));
    }
    list.truncate(count);
    list
}

fn attribute(text: &'static str) -> Attr {
    let (kind, value) = text.split_once(' ').unwrap();
    match kind {
        "i1" => Attr::Bool(value.parse().unwrap()),
        "i32" => Attr::I32(value.parse().unwrap()),
        "i64" => Attr::I64(value.parse().unwrap()),
        "f32" => Attr::F32(value.parse().unwrap()),
        "f64" => Attr::F64(value.parse().unwrap()),
        "i64s" => Attr::I64s(value.split(' ').map(|v| v.parse().unwrap()).collect()),
        "text" => Attr::Text(value.to_owned()),
        _ => panic!("{text}: no such attribute type"),
    }
}

fn case(
    interface: &Interface,
    aliases: &BTreeMap<String, String>,
    target: &'static str,
    change: &Change,
) -> ConformanceCase {
    let mut attributes = interface.attributes.clone();
    attributes.extend(change.attributes.iter().map(|(name, value)| (keep(name), keep(value))));
    attributes.retain(|_, value| *value != "absent");
    let kind = |value: &&'static str| value.split(' ').next();
    let same_kinds = attributes.len() == interface.attributes.len()
        && attributes.iter().all(|(name, value)| interface.attributes.get(name).and_then(kind) == kind(value));
    // A result that no change names follows the operand whose memory it may share.
    let mut results = change.results.clone();
    for (result, operand) in aliases {
        if let Some(changed) = change.operands.get(operand) {
            results.entry(result.clone()).or_insert_with(|| changed.clone());
        }
    }
    let operands = buffers(&interface.operands, interface.required_operands, &change.operands, change.operand_count);
    let results = buffers(&interface.results, interface.required_results, &results, change.result_count);
    let counts = (interface.required_operands..=interface.operands.len()).contains(&operands.len())
        && (interface.required_results..=interface.results.len()).contains(&results.len());
    let place = |list: &[(&str, Typed)], name: &str| list.iter().position(|(n, _)| *n == name).unwrap();
    ConformanceCase {
        target,
        name: keep(&change.name),
        fits: same_kinds && counts && change.memory.is_none(),
        operands,
        results,
        attributes: attributes.into_iter().map(|(name, value)| (name, attribute(value))).collect(),
        aliases: aliases
            .iter()
            .map(|(result, operand)| (place(&interface.operands, operand), place(&interface.results, result)))
            .collect(),
        memory: change.memory,
        refusal: change.refusal.clone(),
    }
}

impl ConformanceCase {
    /// The call. With `in_place`, results share the memory of the operands that they may alias.
    pub fn invocation(&self, in_place: bool) -> Invocation {
        let call = Invocation { description: self.name.to_owned(), ..Invocation::new(self.target) };
        let call = self.operands.iter().fold(call, |call, (name, typed)| call.operand(name, typed.array()));
        let call = self.attributes.iter().fold(call, |call, (name, value)| call.attribute(name, value.clone()));
        self.results.iter().enumerate().fold(call, |call, (index, (name, typed))| {
            let is_given = |operand: usize| operand < self.operands.len();
            let alias = self.aliases.iter().find(|(of, result)| in_place && *result == index && is_given(*of));
            match alias {
                Some((operand, _)) => call.result_in_place(name, *operand),
                None => call.result(name, typed.dtype, &typed.dims),
            }
        })
    }
}
