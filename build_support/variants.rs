//! Parses `kernels/variants.toml`: the kernels to build and the tables of their tiles.
//!
//! Each table of tiles becomes the header `tiles/<table>.cuh` for the kernels and a static array in `OUT_DIR/tiles.rs` for the
//! launches.

use anyhow::{Context, Result, bail, ensure};
use heck::ToUpperCamelCase as _;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Display, Formatter, Write as _};
use std::path::Path;

/// One `[[kernel]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) source: String,
    /// Architecture of the PTX, for instance `80` or `90a`.
    pub(crate) target: String,
    /// Architectures to compile cubins for.
    pub(crate) sass: Vec<String>,
    pub(crate) axes: Vec<Axis>,
    /// Combinations that are not built: each maps some axes to a value.
    #[serde(default)]
    pub(crate) without: Vec<BTreeMap<String, String>>,
    /// Tables that have a row for each variant: `table`, and the keys of the table that are not axes of the kernel.
    #[serde(default)]
    tiles: Vec<BTreeMap<String, Entry>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Axis {
    pub(crate) name: String,
    pub(crate) values: Vec<String>,
}

/// One `[[tiles]]`: a table whose rows are looked up by their first columns, the keys.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tiles {
    name: String,
    keys: Vec<String>,
    columns: Vec<String>,
    rows: Vec<Vec<Entry>>,
}

/// An entry of a row.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Entry {
    Number(u32),
    Flag(bool),
    Name(String),
}

impl Entry {
    /// (C++, Rust)
    fn types(&self) -> (&'static str, &'static str) {
        match self {
            Self::Number(_) => ("int", "u32"),
            Self::Flag(_) => ("bool", "bool"),
            Self::Name(_) => ("typename", "&'static str"),
        }
    }

    fn is_name(&self) -> bool {
        matches!(self, Self::Name(_))
    }
}

impl Display for Entry {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Name(name) => write!(f, "{name}"),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    pub(crate) kernel: Vec<Kernel>,
    tiles: Vec<Tiles>,
}

/// One combination of a kernel's axis values.
#[derive(Debug)]
pub(crate) struct Variant<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) values: Vec<&'a str>,
}

impl Variant<'_> {
    pub(crate) fn name(&self) -> String {
        [&[self.kernel.name.as_str()], &self.values[..]].concat().join("_")
    }

    pub(crate) fn defines(&self) -> impl Iterator<Item = String> {
        let pairs = self.kernel.axes.iter().zip(&self.values);
        pairs.map(|(axis, value)| format!("-DXA_{}={value}", axis.name.to_uppercase()))
    }

    /// The axis values, that of the axis `dtype` last.
    pub(crate) fn values_with_dtype_last(&self) -> Vec<&str> {
        let (dtypes, others): (Vec<_>, Vec<_>) =
            self.kernel.axes.iter().zip(&self.values).partition(|(axis, _)| axis.name == "dtype");
        others.into_iter().chain(dtypes).map(|(_, value)| *value).collect()
    }

    fn value(&self, axis: &str) -> Option<&str> {
        self.kernel.axes.iter().zip(&self.values).find(|(a, _)| a.name == axis).map(|(_, value)| *value)
    }

    /// The value of a tile table's key for this variant: given beside the table, an axis, or derived from the dtype.
    fn key(&self, key: &str, given: &BTreeMap<String, Entry>) -> Result<String> {
        if let Some(value) = given.get(key) {
            return Ok(value.to_string());
        }
        match (self.value(key), self.value("dtype")) {
            (Some(value), _) => Ok(value.to_owned()),
            (None, Some(dtype)) if key == "bytes" => Ok(bytes(dtype)?.to_string()),
            _ => bail!("key {key} is neither an axis nor given beside the table"),
        }
    }
}

/// Bytes of an element of K and V for a value of the axis `dtype`.
fn bytes(dtype: &str) -> Result<u32> {
    match dtype {
        "f32" => Ok(4),
        "f16" | "bf16" => Ok(2),
        "i8" | "fp8" | "fp8_shifted" => Ok(1),
        _ => bail!("dtype {dtype:?}, expected one of f32, f16, bf16, i8, fp8, fp8_shifted where tiles differ by bytes"),
    }
}

impl Kernel {
    /// All combinations of axis values, the last axis fastest; `None` for those that are not built.
    pub(crate) fn combinations(&self) -> Vec<Option<Vec<&str>>> {
        let mut all = vec![vec![]];
        for axis in &self.axes {
            all = all
                .iter()
                .flat_map(|head| axis.values.iter().map(move |v| [head.as_slice(), &[v.as_str()]].concat()))
                .collect();
        }
        all.into_iter().map(|values| (!self.leaves_out(&values)).then_some(values)).collect()
    }

    fn leaves_out(&self, values: &[&str]) -> bool {
        let has =
            |name: &str, value: &str| self.axes.iter().position(|a| a.name == name).is_some_and(|i| values[i] == value);
        self.without.iter().any(|rule| rule.iter().all(|(name, value)| has(name, value)))
    }

    fn check(&self) -> Result<()> {
        let source = Path::new("kernels").join(&self.source);
        ensure!(source.is_file(), "source {:?}, expected a file of kernels/", self.source);
        ensure!(!self.sass.is_empty(), "sass = [], expected the architectures of the SASS");
        for arch in self.sass.iter().chain([&self.target]) {
            let digits = arch.trim_end_matches(['a', 'f']);
            let is_known = digits.parse::<u32>().is_ok_and(|number| (80..=130).contains(&number));
            ensure!(is_known, "architecture {arch:?}, expected one such as \"80\" or \"90a\"");
        }
        for axis in &self.axes {
            ensure!(!axis.values.is_empty(), "axis {}: no values", axis.name);
            let different: BTreeSet<_> = axis.values.iter().collect();
            ensure!(different.len() == axis.values.len(), "axis {}: a value stands twice", axis.name);
        }
        for (name, value) in self.without.iter().flatten() {
            let axis = self.axes.iter().find(|axis| axis.name == *name);
            let axis = axis.with_context(|| format!("without: {name:?} is no axis of it"))?;
            let is_known = axis.values.contains(value);
            ensure!(is_known, "without: {name} = {value:?}, expected one of {:?}", axis.values);
        }
        Ok(())
    }
}

impl Table {
    /// The headers of the tiles for the kernels: names and texts.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (&str, String)> {
        self.tiles.iter().map(|tiles| (tiles.name.as_str(), tiles.header()))
    }

    /// The tiles for the launches, in Rust.
    pub(crate) fn tiles(&self) -> String {
        let axes = self.kernel.iter().flat_map(|kernel| &kernel.axes).map(|axis| axis.name.as_str()).collect();
        self.tiles.iter().map(|tiles| tiles.rust(&axes)).collect()
    }

    pub(crate) fn variants(&self) -> Vec<Variant<'_>> {
        let of =
            |kernel| Kernel::combinations(kernel).into_iter().flatten().map(move |values| Variant { kernel, values });
        self.kernel.iter().flat_map(of).collect()
    }

    /// Checks that every variant has a row in its kernel's tables of tiles, and that every row has a variant.
    fn check_tiles(&self) -> Result<()> {
        let mut used: Vec<BTreeSet<usize>> = self.tiles.iter().map(|_| BTreeSet::new()).collect();
        for variant in self.variants() {
            for given in &variant.kernel.tiles {
                let index =
                    given.get("table").and_then(|name| self.tiles.iter().position(|t| name.to_string() == t.name));
                let known: Vec<_> = self.tiles.iter().map(|t| &t.name).collect();
                let index = index.with_context(|| {
                    format!(
                        "kernel {}: tiles of {:?}, expected a table of {known:?}",
                        variant.kernel.name,
                        given.get("table")
                    )
                })?;
                let tiles = &self.tiles[index];
                let expected: Result<Vec<_>> = tiles.keys.iter().map(|key| variant.key(key, given)).collect();
                let expected =
                    expected.with_context(|| format!("kernel {}: tiles {}", variant.kernel.name, tiles.name))?;
                let row = tiles
                    .rows
                    .iter()
                    .position(|row| row.iter().zip(&expected).all(|(value, expected)| value.to_string() == *expected));
                used[index].insert(row.with_context(|| {
                    let (name, keys) = (variant.name(), tiles.keys.join(", "));
                    format!("tiles {}: no row for {name}, expected one that begins ({keys}) = {expected:?}", tiles.name)
                })?);
            }
        }
        for (tiles, used) in self.tiles.iter().zip(used) {
            if let Some(unused) = (0..tiles.rows.len()).find(|row| !used.contains(row)) {
                bail!("tiles {}: no kernel is built for row {:?}", tiles.name, tiles.rows[unused]);
            }
        }
        Ok(())
    }
}

impl Tiles {
    fn names(&self) -> impl Iterator<Item = &String> {
        self.keys.iter().chain(&self.columns)
    }

    fn check(&self) -> Result<()> {
        let (names, first) = (self.names().count(), self.rows.first().context("no rows")?);
        for row in &self.rows {
            ensure!(row.len() == names, "row {row:?} has {} entries, expected {names}", row.len());
            for ((name, value), first) in self.names().zip(row).zip(first) {
                let is_valid = match value {
                    Entry::Number(_) => true,
                    Entry::Flag(_) => !self.keys.contains(name),
                    Entry::Name(_) => self.keys.contains(name),
                };
                let is_same = std::mem::discriminant(value) == std::mem::discriminant(first);
                ensure!(is_valid && is_same, "row {row:?}: {name} = {value}, expected an entry such as {first}");
            }
        }
        Ok(())
    }

    /// The header of the table: a class template with a specialisation per row. Its parameters are the keys; names become
    /// tag types.
    fn header(&self) -> String {
        let name = self.name.to_upper_camel_case();
        let mut tags = BTreeSet::new();
        let mut rows = String::new();
        for row in &self.rows {
            let (keys, columns) = row.split_at(self.keys.len());
            let arguments = self.keys.iter().zip(keys).map(|(key, value)| match value {
                Entry::Name(name) => format!("{key}_{name}"),
                number => number.to_string(),
            });
            let arguments: Vec<_> = arguments.collect();
            tags.extend(
                arguments.iter().zip(keys).filter(|(_, v)| v.is_name()).map(|(tag, _)| format!("struct {tag};\n")),
            );
            let _ = writeln!(rows, "template <>\nstruct {name}<{}> {{", arguments.join(", "));
            for (column, value) in self.columns.iter().zip(columns) {
                let _ = writeln!(
                    rows,
                    "  static constexpr {} k{} = {value};",
                    value.types().0,
                    column.to_upper_camel_case()
                );
            }
            rows += "};\n";
        }
        let parameters = self.keys.iter().zip(&self.rows[0]).map(|(key, value)| format!("{} {key}", value.types().0));
        let (tags, parameters) = (String::from_iter(tags), parameters.collect::<Vec<_>>().join(", "));
        format!(
            "// Generated from kernels/variants.toml.\n#pragma once\n\nnamespace xa::tiles {{\n\n{tags}\n\
             template <{parameters}>\nstruct {name};\n\n{rows}\n}}  // namespace xa::tiles\n"
        )
    }

    /// The struct and the static array for the launches. For a numeric key that is an axis, the field `<key>_value` is its
    /// value as the axis spells it.
    fn rust(&self, axes: &BTreeSet<&str>) -> String {
        let name = self.name.to_upper_camel_case() + "Tile";
        let line = |row: &[Entry], field: &dyn Fn(&str, &Entry, bool) -> String| -> String {
            self.names()
                .zip(row)
                .map(|(c, entry)| field(c, entry, !entry.is_name() && axes.contains(c.as_str())))
                .collect()
        };
        let fields = line(&self.rows[0], &|column, entry, is_value| {
            let value =
                if is_value { format!("    pub(crate) {column}_value: &'static str,\n") } else { String::new() };
            format!("    pub(crate) {column}: {},\n{value}", entry.types().1)
        });
        let rows = self.rows.iter().map(|row| {
            let row = line(row, &|column, entry, is_value| {
                let value = if is_value { format!("{column}_value: \"{entry}\", ") } else { String::new() };
                let quote = if entry.is_name() { "\"" } else { "" };
                format!("{column}: {quote}{entry}{quote}, {value}")
            });
            format!("    {name} {{ {row}}},\n")
        });
        let (constant, count, rows) = (self.name.to_uppercase(), self.rows.len(), rows.collect::<String>());
        format!(
            "#[derive(Debug)]\npub(crate) struct {name} {{\n{fields}}}\n\n\
             pub(crate) static {constant}: [{name}; {count}] = [\n{rows}];\n"
        )
    }
}

/// Parses and checks `kernels/variants.toml`.
///
/// # Errors
/// Every error names the entry and what was expected.
pub(crate) fn parse(declared: &str) -> Result<Table> {
    let table: Table = toml::from_str(declared)?;
    let mut names = BTreeSet::new();
    for kernel in &table.kernel {
        ensure!(names.insert(&kernel.name), "kernel {}: the name stands twice", kernel.name);
        kernel.check().with_context(|| format!("kernel {}", kernel.name))?;
    }
    for tiles in &table.tiles {
        tiles.check().with_context(|| format!("tiles {}", tiles.name))?;
    }
    table.check_tiles()?;
    Ok(table)
}
