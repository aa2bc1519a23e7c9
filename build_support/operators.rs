//! Generates every layer's list of operators from `ffi/operators.toml`.
//!
//! It writes to `OUT_DIR`: `operators.rs` (the enum [`Op`], signatures, names, argument structs), `bindings/*.cc` (the typed
//! C++ bindings) and `operators.json` (for `xa_info`). `reference.rs` writes the reference pages.

use anyhow::{Context, Result, bail, ensure};
use heck::ToUpperCamelCase as _;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const DECLARATION: &str = "ffi/operators.toml";

/// An operand or a result.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tensor {
    #[serde(default)]
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) type_: String,
    pub(crate) doc: String,
    /// For a result that updates an operand in place: the operand's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) aliases: Option<String>,
    /// Whether a buffer without elements stands for a missing one, so that others may follow.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    may_be_empty: bool,
    #[serde(skip_deserializing)]
    pub(crate) optional: bool,
}

impl Tensor {
    /// Whether a call may omit it.
    fn may_be_left_out(&self) -> bool {
        self.optional || self.may_be_empty
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Bool,
    I64,
    F32,
}

impl Kind {
    /// (MLIR, C++, Rust, the name in `AttributeKind` and `Attribute`)
    pub(crate) fn names(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            Self::Bool => ("i1", "bool", "bool", "Bool"),
            Self::I64 => ("i64", "int64_t", "i64", "I64"),
            Self::F32 => ("f32", "float", "f32", "F32"),
        }
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Attribute {
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) doc: String,
    /// The value that stands for an unused option.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) none: Option<toml::Value>,
}

/// An entry of an operator's list: the name of a shared declaration, or a declaration.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry<T> {
    Shared(String),
    Own(T),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Declared {
    name: String,
    number: i32,
    summary: String,
    also_registered_as: Option<String>,
    operands: Vec<Entry<Tensor>>,
    #[serde(default)]
    optional_operands: Vec<Entry<Tensor>>,
    results: Vec<Entry<Tensor>>,
    #[serde(default)]
    optional_results: Vec<Entry<Tensor>>,
    #[serde(default)]
    attributes: Vec<Entry<Attribute>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Declaration {
    operands: BTreeMap<String, Tensor>,
    results: BTreeMap<String, Tensor>,
    attributes: BTreeMap<String, Attribute>,
    operator: Vec<Declared>,
}

#[derive(Serialize)]
pub(crate) struct Operator {
    pub(crate) name: String,
    pub(crate) target: String,
    number: i32,
    pub(crate) summary: String,
    pub(crate) also_registered_as: Option<String>,
    pub(crate) operands: Vec<Tensor>,
    pub(crate) results: Vec<Tensor>,
    pub(crate) attributes: Vec<Attribute>,
}

/// A declaration that lists contain: a tensor or an attribute.
trait Item: Clone {
    fn name(&mut self) -> &mut String;
    fn set_optional(&mut self, _: bool) {}
}

impl Item for Tensor {
    fn name(&mut self) -> &mut String {
        &mut self.name
    }
    fn set_optional(&mut self, optional: bool) {
        self.optional = optional;
    }
}

impl Item for Attribute {
    fn name(&mut self) -> &mut String {
        &mut self.name
    }
}

/// Reads the declarations and writes all generated files. Returns the operators and the files of the bindings.
pub(crate) fn build(out: &Path) -> Result<(Vec<Operator>, Vec<PathBuf>)> {
    let text = fs::read_to_string(DECLARATION).context(DECLARATION)?;
    let operators = parse(&text).context(DECLARATION)?;
    let write = |name: &str, text: String| fs::write(out.join(name), text).with_context(|| name.to_owned());
    write("operators.rs", rust(&operators))?;
    write("operators.json", serde_json::to_string(&operators)?)?;
    let folder = out.join("bindings");
    fs::create_dir_all(&folder)?;
    let write_binding = |operator: &Operator| {
        let file = folder.join(format!("{}.cc", operator.name));
        fs::write(&file, binding(operator))?;
        Ok(file)
    };
    let bindings = operators.iter().map(write_binding).collect::<Result<_>>()?;
    Ok((operators, bindings))
}

pub(crate) fn parse(text: &str) -> Result<Vec<Operator>> {
    let Declaration { operands, results, attributes, operator } = toml::from_str(text)?;
    let shared = (&operands, &results, &attributes);
    let operators: Vec<Operator> = operator
        .into_iter()
        .map(|declared| {
            let name = declared.name.clone();
            resolve(declared, shared).with_context(|| format!("operator {name}"))
        })
        .collect::<Result<_>>()?;
    check(&operators)?;
    Ok(operators)
}

type Shared<'a> = (&'a BTreeMap<String, Tensor>, &'a BTreeMap<String, Tensor>, &'a BTreeMap<String, Attribute>);

fn resolve(declared: Declared, (operands, results, attributes): Shared) -> Result<Operator> {
    let mut all_operands = entries("operands", declared.operands, operands, false)?;
    all_operands.extend(entries("optional_operands", declared.optional_operands, operands, true)?);
    let mut all_results = entries("results", declared.results, results, false)?;
    all_results.extend(entries("optional_results", declared.optional_results, results, true)?);
    Ok(Operator {
        target: format!("xla_gpu_{}", declared.name),
        name: declared.name,
        number: declared.number,
        summary: declared.summary,
        also_registered_as: declared.also_registered_as,
        operands: all_operands,
        results: all_results,
        attributes: entries("attributes", declared.attributes, attributes, false)?,
    })
}

/// The declarations of the list named `list`; names are looked up in `shared`.
fn entries<T: Item>(list: &str, of: Vec<Entry<T>>, shared: &BTreeMap<String, T>, optional: bool) -> Result<Vec<T>> {
    of.into_iter()
        .enumerate()
        .map(|(index, entry)| {
            let mut item = match entry {
                Entry::Own(item) => item,
                Entry::Shared(name) => {
                    let mut item = shared.get(&name).cloned().with_context(|| {
                        format!("{list}: {name:?} is not declared; expected one of {:?} or a table", shared.keys())
                    })?;
                    *item.name() = name;
                    item
                }
            };
            ensure!(is_name(item.name()), "{list}: entry {index} has name {:?}, expected snake_case", item.name());
            item.set_optional(optional);
            Ok(item)
        })
        .collect()
}

fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c.is_ascii_lowercase())
        && chars.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Checks what involves several declarations.
fn check(operators: &[Operator]) -> Result<()> {
    ensure!(!operators.is_empty(), "no operator, expected at least one");
    let mut kinds: BTreeMap<&str, Kind> = BTreeMap::new();
    for (index, operator) in operators.iter().enumerate() {
        let Operator { name, number, operands, results, attributes, .. } = operator;
        ensure!(is_name(name), "operator {index}: name {name:?}, expected snake_case");
        ensure!(
            *number == index as i32,
            "operator {name}: number {number}, expected {index}: numbers are never reused"
        );
        for (list, names) in [
            ("operands", operands.iter().map(|t| &t.name).collect::<Vec<_>>()),
            ("results", results.iter().map(|t| &t.name).collect()),
            ("attributes", attributes.iter().map(|a| &a.name).collect()),
        ] {
            let distinct: BTreeSet<_> = names.iter().collect();
            ensure!(distinct.len() == names.len(), "operator {name}: a name stands twice in {list}: {names:?}");
        }
        ensure!(!results.is_empty(), "operator {name}: no result, expected at least one");
        for result in results {
            let Some(aliases) = &result.aliases else { continue };
            let found = operands.iter().any(|operand| operand.name == *aliases);
            ensure!(found, "operator {name}: result {} aliases {aliases:?}, expected an operand", result.name);
        }
        ensure!(operands.iter().all(|operand| operand.aliases.is_none()), "operator {name}: an operand has `aliases`");
        ensure!(
            attributes.is_sorted_by(|a, b| a.name < b.name),
            "operator {name}: attributes {:?}, expected them in alphabetical order",
            attributes.iter().map(|a| &a.name).collect::<Vec<_>>()
        );
        for attribute in attributes {
            let kind = *kinds.entry(&attribute.name).or_insert(attribute.kind);
            let (name_, this) = (&attribute.name, attribute.kind);
            ensure!(kind == this, "operator {name}: attribute {name_} is {this:?}, in another operator {kind:?}");
            match (&attribute.none, this) {
                (None, _)
                | (Some(toml::Value::Boolean(_)), Kind::Bool)
                | (Some(toml::Value::Integer(_)), Kind::I64)
                | (Some(toml::Value::Float(_)), Kind::F32) => {}
                (Some(other), _) => bail!("operator {name}: attribute {name_} has none = {other:?}, expected {this:?}"),
            }
        }
    }
    Ok(())
}

/// Names as Rust string literals.
fn literals<'a>(names: impl Iterator<Item = &'a String>) -> String {
    names.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

fn rust(operators: &[Operator]) -> String {
    let mut text = String::from("/// The operators. Their numbers are part of the C interface and never change.\n");
    text += "#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]\n#[repr(i32)]\npub enum Op {\n";
    for Operator { name, number, summary, .. } in operators {
        let _ = writeln!(text, "    /// {summary}\n    {} = {number},", name.to_upper_camel_case());
    }
    text += "}\n\nimpl Op {\n    /// Every operator, by number.\n";
    let all: Vec<_> = operators.iter().map(|operator| format!("Op::{}", operator.name.to_upper_camel_case())).collect();
    let _ = writeln!(text, "    pub const ALL: [Op; {}] = [{}];\n}}\n", all.len(), all.join(", "));
    let _ = writeln!(text, "static SIGNATURES: [Signature; {}] = [", all.len());
    for operator in operators {
        text += &signature(operator);
    }
    text += "];\n\n";
    let tensors = |of: fn(&Operator) -> &[Tensor]| -> Vec<Vec<Option<&String>>> {
        operators.iter().map(|operator| of(operator).iter().map(|tensor| Some(&tensor.name)).collect()).collect()
    };
    text += &names("Operand", "operand", &tensors(|operator| &operator.operands));
    text += &names("CallResult", "result", &tensors(|operator| &operator.results));
    for kind in [Kind::Bool, Kind::I64, Kind::F32] {
        let (_, _, rust, variant) = kind.names();
        let attributes: Vec<Vec<_>> = operators
            .iter()
            .map(|o| o.attributes.iter().map(|a| (a.kind == kind).then_some(&a.name)).collect())
            .collect();
        text += &names(&format!("{variant}Attribute"), &format!("attribute of type `{rust}`"), &attributes);
    }
    text += "/// Calls field by field, in the order of the signature.\npub(crate) mod arguments {\n";
    text += "    use super::Attribute;\n";
    for operator in operators {
        text += &arguments(operator);
    }
    text += "}\n\n";
    text += "/// `$each! { Op module, ... }`: the operators by number, each with the name of its modules.\n";
    text += "macro_rules! for_each_operator {\n    ($each:ident) => {\n        $each! {\n";
    for Operator { name, .. } in operators {
        let _ = writeln!(text, "            {} {name},", name.to_upper_camel_case());
    }
    text += "        }\n    };\n}\npub(crate) use for_each_operator;\n\n";
    text += "/// `$row!($set, name, target)` for each target of a set of handlers.\n";
    text += "macro_rules! for_each_target {\n    ($row:ident, $set:literal) => {\n        [\n";
    for Operator { name, target, also_registered_as, .. } in operators {
        for target in [Some(target), also_registered_as.as_ref()].into_iter().flatten() {
            let _ = writeln!(text, "            $row!($set, {name:?}, {target:?}),");
        }
    }
    text += "        ]\n    };\n}\npub(crate) use for_each_target;\n";
    text
}

fn signature(operator: &Operator) -> String {
    let Operator { target, operands, results, attributes, .. } = operator;
    let required = |tensors: &[Tensor]| tensors.iter().filter(|t| !t.optional).count();
    let attributes: Vec<_> =
        attributes.iter().map(|a| format!("({:?}, AttributeKind::{})", a.name, a.kind.names().3)).collect();
    format!(
        "    Signature {{\n        number: {},\n        target: {target:?},\n        operands: &[{}],\n        \
         required_operands: {},\n        results: &[{}],\n        required_results: {},\n        attributes: &[{}],\n    }},\n",
        operator.number,
        literals(operands.iter().map(|t| &t.name)),
        required(operands),
        literals(results.iter().map(|t| &t.name)),
        required(results),
        attributes.join(", ")
    )
}

/// An enum of the names that occur in any operator, so that a misspelt name does not compile. `lists` has a list for each
/// operator, with `None` in the place of what is of another kind.
fn names(enum_: &str, kind: &str, lists: &[Vec<Option<&String>>]) -> String {
    let distinct: BTreeSet<_> = lists.iter().flatten().flatten().collect();
    let mut text = format!("/// The names of every {kind}.\n#[derive(Clone, Copy, Debug, PartialEq, Eq)]\n");
    let _ = writeln!(text, "pub(crate) enum {enum_} {{");
    for name in &distinct {
        let _ = writeln!(text, "    {},", name.to_upper_camel_case());
    }
    let _ = writeln!(text, "}}\n\nimpl {enum_} {{\n    pub(crate) const fn name(self) -> &'static str {{");
    text += "        match self {\n";
    for name in &distinct {
        let _ = writeln!(text, "            Self::{} => {name:?},", name.to_upper_camel_case());
    }
    text += "        }\n    }\n\n    /// Its place in the list of the operator of a signature.\n";
    text += "    pub(crate) fn place(self, signature: &Signature) -> Option<usize> {\n";
    let _ = writeln!(text, "        static PLACES: [[Option<u8>; {}]; {}] = [", distinct.len(), lists.len());
    for list in lists {
        let place = |name: &&String| list.iter().position(|other| *other == Some(*name));
        let _ = writeln!(text, "            {:?},", distinct.iter().map(|name| place(name)).collect::<Vec<_>>());
    }
    text += "        ];\n        PLACES[signature.number][self as usize].map(usize::from)\n    }\n}\n\n";
    text
}

/// Structs with an operator's operands, results and attributes as fields.
fn arguments(operator: &Operator) -> String {
    let mut text = format!("    pub(crate) mod {} {{\n", operator.name);
    for (struct_, tensors) in [("Operands", &operator.operands), ("Results", &operator.results)] {
        let _ = writeln!(text, "        pub(crate) struct {struct_}<T> {{");
        for tensor in tensors {
            let type_ = if tensor.may_be_left_out() { "Option<T>" } else { "T" };
            let _ = writeln!(text, "            pub(crate) {}: {type_},", tensor.name);
        }
        let field = |tensor: &Tensor| {
            if tensor.may_be_left_out() {
                format!("self.{}", tensor.name)
            } else {
                format!("Some(self.{})", tensor.name)
            }
        };
        let fields: Vec<_> = tensors.iter().map(field).collect();
        let _ = writeln!(text, "        }}\n        impl<T> {struct_}<T> {{");
        let _ = writeln!(text, "            pub(crate) fn in_order(self) -> [Option<T>; {}] {{", tensors.len());
        let _ = writeln!(text, "                [{}]\n            }}\n        }}", fields.join(", "));
    }
    if !operator.attributes.is_empty() {
        let rust = |kind: Kind| kind.names().2;
        text += "        pub(crate) struct Attributes {\n";
        for attribute in &operator.attributes {
            let _ = writeln!(text, "            pub(crate) {}: {},", attribute.name, rust(attribute.kind));
        }
        let values: Vec<_> = operator
            .attributes
            .iter()
            .map(|a| format!("super::Attribute::{}(self.{})", a.kind.names().3, a.name))
            .collect();
        let _ = writeln!(text, "        }}\n        impl Attributes {{");
        let _ = writeln!(text, "            pub(crate) fn in_order(&self) -> [super::Attribute; {}] {{", values.len());
        let _ = writeln!(text, "                [{}]\n            }}\n        }}", values.join(", "));
    }
    text += "    }\n";
    text
}

/// The C++ binding of an operator; ffi/README.md shows one.
fn binding(operator: &Operator) -> String {
    let mut list: Vec<(String, &str)> = vec![];
    for operand in &operator.operands {
        let bind = if operand.optional { ".OptionalArg<xa::Any>()" } else { ".Arg<xa::Any>()" };
        list.push((bind.into(), &operand.name));
    }
    for result in &operator.results {
        let bind = if result.optional { ".OptionalRet<xa::Any>()" } else { ".Ret<xa::Any>()" };
        list.push((bind.into(), &result.name));
    }
    list.push((".RemainingArgs()".into(), ""));
    list.push((".RemainingRets()".into(), ""));
    for attribute in &operator.attributes {
        list.push((format!(".Attr<{}>({:?})", attribute.kind.names().1, attribute.name), ""));
    }
    if operator.attributes.is_empty() {
        list.push((".Attrs()".into(), ""));
    }
    let width = list.iter().filter(|(_, name)| !name.is_empty()).map(|(bind, _)| bind.len()).max().unwrap_or(0);
    let mut text = format!("#include \"binding.h\"\n\nXA_TARGET({}, {},\n", operator.name, operator.number);
    let last = list.len() - 1;
    for (index, (bind, name)) in list.iter().enumerate() {
        let close = if index == last { ")" } else { "" };
        let _ = match *name {
            "" => writeln!(text, "          {bind}{close}"),
            name => writeln!(text, "          {bind:width$}  // {name}"),
        };
    }
    text
}
