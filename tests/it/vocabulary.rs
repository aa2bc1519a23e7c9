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
    // Names of the library.
    retired("carry_out", "execute"),
    retired("*merge_part*", "combine"),
    retired("stand_before", "wrap; the C function xa_stand_before_pjrt_plugin is public and keeps its name"),
    retired("take_over", "fuse_update"),
    retired("look_over", "validate_metadata"),
    retired("Door", "entry point"),
    retired("planted_faults", "failpoints"),
    // Names of the tests.
    retired("faulty_libcuda", "fake_libcuda"),
    retired("stand_in", "fake_libcuda"),
    retired("run_spread", "run_strided"),
];

/// Records of the past, which keep its words, and this table.
const NOT_SEARCHED: [&str; 3] = ["CHANGELOG.md", "docs/performance.md", file!()];

/// A word of a text.
struct Word<'a> {
    text: &'a str,
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
            words.push(Word { text: &rest[..end], line, continues });
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
fn is_word(pattern: &str, word: &str) -> bool {
    let lower = word.to_lowercase();
    let word = if pattern.contains(char::is_uppercase) { word } else { &lower };
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
        let same = pattern.iter().zip(*phrase).all(|(pattern, word)| is_word(pattern, word.text));
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
    relative.filter(|(path, _)| !path.starts_with("xla_headers/include/") && !NOT_SEARCHED.contains(&path.as_str()))
}

#[test]
fn no_retired_word_is_used() {
    let (mut searched, mut uses) = (0, Vec::new());
    for (path, text) in texts() {
        searched += 1;
        let words = words(&text);
        for Retired { pattern, instead, stays_in } in RETIRED {
            if stays_in.iter().any(|(stays, _)| path.starts_with(stays)) {
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
