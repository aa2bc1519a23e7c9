//! A seeded stream of numbers, the same on every machine, and properties that hold for all that is made of one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// `SplitMix64` (Steele, Lea, Flood 2014).
pub struct Random {
    state: u64,
    /// Of a stream that is repeated.
    script: Option<Script>,
}

/// The choices of [`Random::below`], given and made so far.
struct Script {
    given: Option<Vec<usize>>,
    made: Vec<usize>,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { state: seed, script: None }
    }

    /// Choices that a fuzzer makes, two bytes each; at the end the first of all.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let given = bytes.chunks(2).map(|pair| pair.iter().rev().fold(0, |n, &byte| n << 8 | usize::from(byte)));
        Self { state: 0, script: Some(Script { given: Some(given.collect()), made: vec![] }) }
    }

    /// How many of the given choices are left.
    pub fn left(&self) -> usize {
        self.script.as_ref().map_or(0, |s| s.given.as_ref().map_or(0, Vec::len).saturating_sub(s.made.len()))
    }

    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `[0, end)`.
    pub fn below(&mut self, end: usize) -> usize {
        let drawn = (self.next() % end as u64) as usize;
        let Some(Script { given, made }) = &mut self.script else { return drawn };
        let choice = given.as_ref().map_or(drawn, |given| given.get(made.len()).map_or(0, |choice| choice % end));
        made.push(choice);
        choice
    }

    /// From `least` to `most`.
    pub fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// With this probability, of 100.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) >= 100 - percent
    }

    /// In `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Mean 0, variance 1, bell-shaped within ±3.5: the sum of four numbers of 16 bits.
    pub fn normal(&mut self) -> f64 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt()
    }

    /// Any i32, the extreme ones and small ones often.
    pub fn hostile_i32(&mut self) -> i32 {
        match self.below(8) {
            0 => i32::MIN,
            1 => i32::MAX,
            2 => -1,
            3 => 0,
            4 => i32::MIN + self.below(1000) as i32,
            5 => i32::MAX - self.below(1000) as i32,
            6 => self.below(64) as i32 - 16,
            _ => self.next() as i32,
        }
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// Choices that are tried in place of those of a case that fails.
const MOST_SHRUNK: usize = 200;

/// `check` holds for `count` cases (or `XLA_ATTENTION_TEST_CASES`), always the same ones, which it makes of its choices. Of a
/// case that fails, choices become 0 or half of what they were as long as it fails; then it fails the test.
pub fn for_all(count: u64, check: &dyn Fn(&mut Random)) {
    let cases = std::env::var("XLA_ATTENTION_TEST_CASES").map_or(count, |n| n.parse().unwrap());
    let failure = |state: u64, given: Option<Vec<usize>>| {
        let mut random = Random { state, script: Some(Script { given, made: vec![] }) };
        let failed = catch_unwind(AssertUnwindSafe(|| check(&mut random))).err();
        failed.map(|panic| (random.script.unwrap().made, panic))
    };
    for seed in 0..cases {
        let Some(mut failed) = failure(seed << 32, None) else { continue };
        let (mut at, mut tried) = (0, 0);
        while at < failed.0.len() && tried < MOST_SHRUNK {
            let choice = failed.0[at];
            let smaller = [0, choice / 2, choice.saturating_sub(1)].into_iter().filter(|n| *n < choice).find_map(|n| {
                tried += 1;
                let mut given = failed.0.clone();
                given[at] = n;
                failure(seed << 32, Some(given))
            });
            match smaller {
                // It may go on from there.
                Some(smaller) => failed = smaller,
                None => at += 1,
            }
        }
        println!("case {seed}, its choices after shrinking: {:?}", failed.0);
        resume_unwind(failed.1);
    }
}
