//! A seeded random number generator that gives the same numbers on every machine, and property-based tests with
//! shrinking.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// `SplitMix64` (Steele, Lea, Flood 2014).
pub struct Random {
    state: u64,
    /// The recorded choices, if they are replayed or shrunk.
    script: Option<Script>,
}

/// The results of [`Random::below`]: those that are given, and those so far.
struct Script {
    given: Option<Vec<usize>>,
    made: Vec<usize>,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { state: seed, script: None }
    }

    /// A generator whose choices a fuzzer makes, two bytes each. After the last one all choices are 0.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let given = bytes.chunks(2).map(|pair| pair.iter().rev().fold(0, |n, &byte| n << 8 | usize::from(byte)));
        Self { state: 0, script: Some(Script { given: Some(given.collect()), made: vec![] }) }
    }

    /// Number of given choices that are left.
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

    /// A number in `[0, end)`.
    pub fn below(&mut self, end: usize) -> usize {
        let drawn = (self.next() % end as u64) as usize;
        let Some(Script { given, made }) = &mut self.script else { return drawn };
        let choice = given.as_ref().map_or(drawn, |given| given.get(made.len()).map_or(0, |choice| choice % end));
        made.push(choice);
        choice
    }

    /// A number in `[least, most]`.
    pub fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// True with a probability of `percent` %.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) >= 100 - percent
    }

    /// A number in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number with mean 0 and variance 1, approximately normal, within ±3.5: the sum of four 16-bit numbers.
    pub fn normal(&mut self) -> f64 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt()
    }

    /// Any i32; extreme and small ones are frequent.
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

/// Number of attempts to shrink a failing case.
const MAX_SHRINK_ATTEMPTS: usize = 200;

/// Calls `property` for `count` cases (or `XLA_ATTENTION_TEST_CASES`), the same ones in each run. In a failing case,
/// choices are replaced by 0, a half, or one less as long as it still fails; then the test fails.
pub fn for_all(count: u64, property: &dyn Fn(&mut Random)) {
    let cases = std::env::var("XLA_ATTENTION_TEST_CASES").map_or(count, |n| n.parse().unwrap());
    let failure = |state: u64, given: Option<Vec<usize>>| {
        let mut random = Random { state, script: Some(Script { given, made: vec![] }) };
        let failed = catch_unwind(AssertUnwindSafe(|| property(&mut random))).err();
        failed.map(|panic| (random.script.unwrap().made, panic))
    };
    for seed in 0..cases {
        let Some(mut failed) = failure(seed << 32, None) else { continue };
        let (mut at, mut tried) = (0, 0);
        while at < failed.0.len() && tried < MAX_SHRINK_ATTEMPTS {
            let choice = failed.0[at];
            let smaller = [0, choice / 2, choice.saturating_sub(1)].into_iter().filter(|n| *n < choice).find_map(|n| {
                tried += 1;
                let mut given = failed.0.clone();
                given[at] = n;
                failure(seed << 32, Some(given))
            });
            match smaller {
                // The same choice may become still smaller.
                Some(smaller) => failed = smaller,
                None => at += 1,
            }
        }
        println!("case {seed}, its choices after shrinking: {:?}", failed.0);
        resume_unwind(failed.1);
    }
}
